"""What calibrated caches know of a model: measured once on a short text, kept as a small file."""

from .calibration import Calibration
from .default import default_bits, default_calibration
from .mixed_bits import choose_bits
from .observation import calibrate

__all__ = ["Calibration", "calibrate", "choose_bits", "default_bits", "default_calibration"]
