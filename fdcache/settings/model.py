"""Where a model comes from and how its weights are loaded."""

from fdcache.settings.kinds import FilePath, Flag, TextList
from fdcache.settings.variable import EngineChoice, Group, OldType, variable


class ModelSource(EngineChoice):
    """The hub that models are fetched from."""

    AISTUDIO = "AISTUDIO"
    MODELSCOPE = "MODELSCOPE"
    HUGGINGFACE = "HUGGINGFACE"


class ModelSettings(Group):
    """Model source, weights and plug-ins."""

    source: ModelSource = variable(
        "FD_MODEL_SOURCE", ModelSource.AISTUDIO, "The hub that models are fetched from.", old=OldType.TEXT
    )
    cache: FilePath | None = variable(
        "FD_MODEL_CACHE", None, "The folder that models are downloaded to.", old=OldType.TEXT
    )
    use_hf_tokenizer: Flag = variable(
        "FD_USE_HF_TOKENIZER", False, "Use the Hugging Face tokenizer.", old=OldType.BOOL
    )
    torch_format: Flag = variable(
        "FD_FOR_TORCH_MODEL_FORMAT", False, "Read weights in the PyTorch format.", old=OldType.BOOL
    )
    enable_cache: Flag = variable(
        "FD_ENABLE_MODEL_CACHE", False, "Keep loaded models in a cache.", old=OldType.BOOL
    )
    enable_load_cache: Flag = variable(
        "FD_ENABLE_MODEL_LOAD_CACHE",
        False,
        "Store quantised weights, so that the next start loads them.",
        old=OldType.BOOL,
    )
    enable_v1_update: Flag = variable(
        "FD_ENABLE_V1_UPDATE_WEIGHTS", False, "Update weights by control messages.", old=OldType.BOOL
    )
    use_fastsafetensor: Flag = variable(
        "FD_USE_FASTSAFETENSOR",
        False,
        "Load weights with fastsafetensors.",
        old=OldType.BOOL,
        undeclared=True,
    )
    align_training: Flag = variable(
        "FD_ENABLE_RL", False, "Align the precision of inference with training.", old=OldType.INT
    )
    plugins: TextList | None = variable(
        "FD_PLUGINS",
        None,
        "The plug-ins to load, `fdcache` among them; without it none is loaded.",
        old=OldType.LIST,
    )
