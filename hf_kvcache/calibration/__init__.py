"""What calibrated caches know of a model: measured once on a short text, kept as a small file."""

from .calibration import Calibration
from .default import default_calibration
from .observation import calibrate

__all__ = ["Calibration", "calibrate", "default_calibration"]
