"""The cache of a whole model: what `generate()` and plain forward calls use, layer by layer."""

import contextlib
import copy
import os
import weakref
from collections.abc import Iterator

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from . import compat
from .eviction.compression import evict_together, evicting_layers, reconstruct_and_evict
from .layers.layer import KVLayer
from .layers.states import StateLayer
from .native.indexed_layer import IndexedLayer
from .registry import Recipe
from .report import MemoryReport, build_report
from .saving import save_cache


class KVCache(Cache):
    """A transformers `Cache` whose layers are ours. Build one with `make_cache`.

    Everything that changes all layers is checked on all of them first, so that a refusal leaves the cache as it was.

    Args:
        layers: one layer for each layer of the model.
        recipe: the techniques and options the layers were built from.
        model: the model they serve; not kept alive by its cache.
    """

    def __init__(self, layers: list, recipe: Recipe, model: PreTrainedModel):
        compat.enable()
        super().__init__(layers=layers)
        self.recipe = recipe
        self._model = weakref.ref(model)

    def __repr__(self) -> str:
        return f"KVCache({self.recipe.name!r}, {len(self.layers)} layers, {self.num_tokens_seen} tokens seen)"

    @property
    def num_tokens_seen(self) -> int:
        """Tokens a sequence that went in, those no longer stored included."""
        return max((layer.get_seq_length() for layer in self.layers if hasattr(layer, "seen")), default=0)

    @property
    def holds_anything(self) -> bool:
        """Whether a model has put tokens or states into this cache."""
        return any(hasattr(layer, "batch_size") for layer in self._storing_layers)

    @property
    def position_ids(self) -> torch.Tensor:
        """Positions of indexer keys, `[dims, B, T]`: before 5.23 models look for them here, later on a layer.

        Raises:
            AttributeError: if there are none, as a model tells by it that nothing is cached.
        """
        layer = next((layer for layer in self.layers if isinstance(layer, IndexedLayer)), None)
        if layer is None or layer.indexer_position_ids is None:
            raise AttributeError("no layer of this cache has positions of indexer keys")
        return layer.indexer_position_ids

    @position_ids.setter
    def position_ids(self, position_ids: torch.Tensor) -> None:
        next(layer for layer in self.layers if isinstance(layer, IndexedLayer)).indexer_position_ids = position_ids

    def report(self) -> MemoryReport:
        """What this cache holds now, measured from its live tensors."""
        return build_report(self)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        # Block tables live on the host: one sync a step for all layers.
        self._select_rows(beam_idx.cpu().numpy())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times; the copies share their blocks until they differ."""
        if (rows := self.batch_size) > 0:
            self._select_rows(np.repeat(np.arange(rows), repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if (rows := self.batch_size) > 0:
            self._select_rows(np.arange(rows)[indices.cpu().numpy()])

    def _select_rows(self, rows: np.ndarray) -> None:
        for layer in self._storing_layers:
            layer.select_rows(rows)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest `-tokens_to_remove` tokens; `crop(0)` commits what was recorded for a rollback."""
        layers = self._storing_layers
        refusing = [layer for layer in layers if tokens_to_remove > 0 or not layer.can_crop(-tokens_to_remove)]
        for layer in refusing[:1] or layers:
            layer.crop(tokens_to_remove)

    @property
    def is_croppable(self) -> bool:
        return all(layer.can_crop(0) for layer in self._storing_layers)

    @property
    def _storing_layers(self) -> list[KVLayer | StateLayer]:
        """All layers but those that share another layer's keys and values."""
        return [layer for layer in self.layers if isinstance(layer, (KVLayer, StateLayer))]

    @property
    def evicts(self) -> bool:
        """Whether tokens are evicted from this cache: then `compress` may be called."""
        return bool(evicting_layers(self.layers))

    def compress(self, input_ids: torch.Tensor | None = None) -> None:
        """Evict tokens now, as the technique's options say; `generate()` does it by itself when a prompt is in.

        Args:
            input_ids: `[B, T]`, the tokens in the cache, padding included, or the newest of them. Needed by policies
                that read them a second time (`kvzip`).

        Raises:
            ValueError: if nothing of this cache evicts, or the ids are needed and missing or do not fit.
        """
        layers = evicting_layers(self.layers)
        if not layers:
            raise ValueError(f"cache {self.recipe.name!r} evicts nothing: build one with an eviction technique.")
        if not self.num_tokens_seen:
            return
        if not layers[0].policy.needs_reconstruction:
            if layers[0].evicts_together:
                evict_together(layers)
                return
            for layer in layers:
                layer.evict()
            return
        if input_ids is None or not input_ids.shape[1]:
            raise ValueError(_NO_IDS.format(name=self.recipe.name))
        reconstruct_and_evict(self._living_model(), self, input_ids)

    @contextlib.contextmanager
    def prompt(self, input_ids: torch.Tensor, end: int) -> Iterator[None]:
        """The tokens up to slot `end` that run in this context are a prompt; evict when they are in."""
        layers = evicting_layers(self.layers)
        # The cache of a draft model is not compressed: its tokens are taken back.
        is_joint = bool(layers) and layers[0].evicts_together and not layers[0].record_past
        if is_joint and layers[0].policy.needs_reconstruction and not input_ids.shape[1]:
            raise ValueError(_NO_IDS.format(name=self.recipe.name))
        for layer in layers:
            layer.begin_prompt(end)
        try:
            yield
            if is_joint:
                self.compress(input_ids)
        finally:
            for layer in layers:
                layer.end_prompt()

    def check_recordable(self) -> None:
        """Refuse assisted decoding early where a rollback is impossible.

        Raises:
            NotImplementedError: if the model has recurrent states, or tokens are evicted while others are drafted.
        """
        for layer in evicting_layers(self.layers)[:1]:
            if layer.plan.interval is not None or (layer.evicts_together and not self.num_tokens_seen):
                raise NotImplementedError(_CANNOT_DRAFT.format(name=self.recipe.name))
        if any(isinstance(layer, StateLayer) for layer in self.layers):
            raise NotImplementedError(
                "assisted decoding must take back rejected tokens, which recurrent (Mamba) states cannot: generate "
                "without assistant_model and prompt_lookup_num_tokens."
            )

    def stop_past_recording(self) -> None:
        """Undo `activate_past_recording`: windows forget again without waiting for a `crop`."""
        for layer in self._storing_layers:
            layer.stop_past_recording()

    def fork(self) -> "KVCache":
        """A second cache over the same tokens: blocks are shared until one of the two writes them."""
        layers = [layer.fork() if layer in self._storing_layers else layer for layer in self.layers]
        forked = copy.copy(self)
        forked.layers = layers
        return forked

    def save(self, path: str | os.PathLike) -> None:
        """Write everything this cache holds to a safetensors file, encoded tokens as they are, or nothing on an error.

        `hf_kvcache.load_cache(model, path)` reads it. A past that was recorded for a rollback is kept and can be rolled
        back after loading. Forks are saved each by itself; sequences of one cache go on sharing their blocks.

        Raises:
            RuntimeError: in the middle of a forward pass, or if the model does not exist any more.
        """
        save_cache(self, self._living_model(), path)

    def _living_model(self) -> PreTrainedModel:
        if (model := self._model()) is None:
            raise RuntimeError("the model that this cache was built for does not exist any more: keep it.")
        return model

    def to(self, device: torch.device | str) -> "KVCache":
        """Move every stored tensor to `device`, in place; returns the cache."""
        pools: dict = {}
        for layer in self._storing_layers:
            layer.to(torch.device(device), pools)
        return self


_NO_IDS = (
    "{name!r} reads the prompt a second time and was given no token ids: call compress(input_ids), and give generate() "
    "input_ids, not inputs_embeds; or use another policy, for example 'blend'."
)
_CANNOT_DRAFT = (
    "assisted decoding with {name!r} would draft tokens while others are evicted: use when='prefill'; with 'kvzip' "
    "and 'compressed', run the prompt and call cache.compress(input_ids) first, then generate(cache=cache)."
)
