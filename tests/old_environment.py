"""The values of the environment module that fdcache.envs replaces, by its description.

The readers take the environment as a mapping, so that both sides can be asked about the same one.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

Environ = Mapping[str, str]
Reader = Callable[[Environ], Any]

TEXTS: dict[str, str | None] = {
    "FD_CPU_USE_BF16": "False",
    "FD_BUILDING_ARCS": "[]",
    "FD_LOG_DIR": "log",
    "FD_LOG_LEVEL": None,
    "FD_TRACE": "off",
    "FD_LOG_BACKUP_COUNT": "7",
    "FD_MODEL_SOURCE": "AISTUDIO",
    "FD_MODEL_CACHE": None,
    "CUDA_VISIBLE_DEVICES": None,
    "FD_CACHE_PARAMS": "none",
    "FD_ATTENTION_BACKEND": "APPEND_ATTN",
    "FD_SAMPLING_CLASS": "base",
    "FD_MOE_BACKEND": "cutlass",
    "FD_MOE_MXFP4_BACKEND": "flashinfer",
    "FD_USE_MACHETE": "1",
    "FD_DISABLED_RECOVER": "0",
    "FD_TRITON_KERNEL_CACHE_DIR": None,
    "FD_PD_CHANGEABLE": "0",
    "TRACES_ENABLE": "false",
    "FD_SERVICE_NAME": "FastDeploy",
    "FD_HOST_NAME": "localhost",
    "TRACES_EXPORTER": "console",
    "EXPORTER_OTLP_ENDPOINT": None,
    "EXPORTER_OTLP_HEADERS": None,
    "FD_JOB_ID": None,
    "FD_ZMQ_RECV_REQUEST_SERVER_PORT": None,
    "FD_ZMQ_SEND_RESPONSE_SERVER_PORT": None,
    "FD_ZMQ_RECV_REQUEST_SERVER_PORTS": None,
    "FD_ZMQ_SEND_RESPONSE_SERVER_PORTS": None,
    "FD_ZMQ_CONTROL_CMD_SERVER_PORTS": "8202",
    "FD_ENABLE_CACHE_TASK": "0",
    "FD_LIMIT_THINKING_CONTENT_TRUNCATE_STR": "</think>",
    "ENCODE_FEATURE_BOS_AK": None,
    "ENCODE_FEATURE_BOS_SK": None,
    "ENCODE_FEATURE_ENDPOINT": None,
    "FD_HPU_MEASUREMENT_MODE": "0",
    "FD_USAGE_SOURCE": "Unknown",
    "FMQ_CONFIG_JSON": None,
    "FD_XPU_MOE_FFN_QUANT_TYPE_MAP": "",
    "FILE_BACKEND_STORAGE_DIR": "/tmp/fastdeploy",
}

INTEGERS: dict[str, str] = {
    "FD_DEBUG": "0",
    "FD_LOG_REQUESTS": "1",
    "FD_LOG_REQUESTS_LEVEL": "2",
    "FD_LOG_MAX_LEN": "2048",
    "FD_MAX_STOP_SEQS_NUM": "5",
    "FD_STOP_SEQS_MAX_LEN": "8",
    "ENABLE_V1_KVCACHE_SCHEDULER": "1",
    "FD_ENC_DEC_BLOCK_NUM": "2",
    "FD_ENABLE_MAX_PREFILL": "0",
    "FD_SUPPORT_MAX_CONNECTIONS": "1024",
    "FD_TP_GROUP_GID_OFFSET": "1000",
    "FD_CONSOLE_DECODE_LOG_INTERVAL": "5",
    "FD_ENABLE_INTERNAL_ADAPTER": "0",
    "FD_EP_MAX_PREFETCH_TASK_NUM": "8",
    "FD_ENABLE_SWAP_SPACE_CLEARING": "0",
    "FD_CACHE_PROC_EXIT_TIMEOUT": "600",
    "FD_CACHE_PROC_ERROR_COUNT": "10",
    "PREFILL_CONTINUOUS_REQUEST_DECODE_RESOURCES": "1",
    "FD_ENABLE_E2W_TENSOR_CONVERT": "0",
    "FD_ENGINE_TASK_QUEUE_WITH_SHM": "0",
    "FD_FILL_BITMASK_BATCH": "4",
    "FD_ENABLE_PDL": "1",
    "FD_ENABLE_ASYNC_LLM": "0",
    "FD_LLGUIDANCE_LOG_LEVEL": "0",
    "FD_HPU_CHUNK_SIZE": "64",
    "FD_PREFILL_WAIT_DECODE_RESOURCE_SECONDS": "30",
    "FD_ENABLE_REQUEST_DISCONNECT_STOP_INFERENCE": "1",
    "FD_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS": "500",
    "FD_OTLP_EXPORTER_MAX_EXPORT_BATCH_SIZE": "64",
    "FD_RESERVE_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL": "16",
    "FD_RESERVE_MIN_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL": "0",
    "FD_WORKER_ALIVE_TIMEOUT": "30",
    "FD_CUSTOM_AR_MAX_SIZE_MB": "8",
    "FD_PD_REORDER": "0",
    "ZMQ_SEND_BATCH_DATA": "1",
    "FD_ENABLE_RL": "0",
    "ENABLE_V1_KVCACHE_MANAGER": "0",
}

BOOLEANS: dict[str, str] = {
    "FD_USE_HF_TOKENIZER": "0",
    "FD_NVFP4_LOAD_BLOCKSCALE_LEAVE": "0",
    "FD_USE_DEEP_GEMM": "0",
    "FD_USE_BLACKWELL_GEMM": "0",
    "FD_USE_PFCC_DEEP_EP": "0",
    "FD_USE_AGGREGATE_SEND": "0",
    "FD_ENABLE_MULTI_API_SERVER": "0",
    "FD_FOR_TORCH_MODEL_FORMAT": "0",
    "FD_DISABLE_CHUNKED_PREFILL": "0",
    "FD_USE_GET_SAVE_OUTPUT_V1": "0",
    "FD_ENABLE_MODEL_CACHE": "0",
    "FD_CONSOLE_SCHEDULER_METRICS": "1",
    "FD_ENABLE_MODEL_LOAD_CACHE": "0",
    "FD_ENABLE_RETURN_TEXT": "0",
    "FD_ENABLE_PD_RDMA_EAGER_CONNECT": "0",
    "FD_GUIDANCE_DISABLE_ADDITIONAL": "1",
    "FD_XPU_ENABLE_MIXED_EP_MODE": "0",
    "FD_DETERMINISTIC_MODE": "0",
    "FD_DETERMINISTIC_LOG_MODE": "0",
    "FD_MOE_PROB_IN_ADVANCE": "0",
    "FD_ENABLE_V1_UPDATE_WEIGHTS": "0",
    "FD_SAVE_OUTPUT_CACHE_FOR_PREEMPTED_REQUEST": "1",
    "FD_USE_PHI_FP8_QUANT": "1",
    "FD_USE_PHI_MOE_TOPK": "0",
    "FD_USE_PHI_MOE_PERMUTE": "0",
    "FD_USE_PHI_RMSNORM": "0",
    "FD_SiluAndMul_USE_PHI_SWIGLU": "0",
    "FD_FP8_QUANT_WITH_POW2SCALE": "0",
}

FLOATS: dict[str, str] = {
    "FD_TOKEN_PROCESSOR_HEALTH_TIMEOUT": "120",
    "FD_RESERVE_DECAY_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL": "0.025",
}


def _text(name: str, default: str | None) -> Reader:
    return lambda environ: environ.get(name, default)


def _integer(name: str, default: str) -> Reader:
    return lambda environ: int(environ.get(name, default))


def _boolean(name: str, default: str) -> Reader:
    return lambda environ: bool(int(environ.get(name, default)))


def _float(name: str, default: str) -> Reader:
    return lambda environ: float(environ.get(name, default))


def _items(name: str, default: list[str] | None) -> Reader:
    return lambda environ: environ[name].split(",") if name in environ else default


def _split_kv_size(environ: Environ) -> int:
    size = int(environ.get("FD_DETERMINISTIC_SPLIT_KV_SIZE", "16"))
    if size <= 0 or size & (size - 1):
        raise ValueError("FD_DETERMINISTIC_SPLIT_KV_SIZE must be a positive power of two")
    return size


def _config_root(environ: Environ) -> str:
    return os.path.expanduser(environ.get("FD_CONFIG_ROOT", "~/.config/fastdeploy"))  # noqa: PTH111


READERS: dict[str, Reader] = {
    **{name: _text(name, default) for name, default in TEXTS.items()},
    **{name: _integer(name, default) for name, default in INTEGERS.items()},
    **{name: _boolean(name, default) for name, default in BOOLEANS.items()},
    **{name: _float(name, default) for name, default in FLOATS.items()},
    "FD_PLUGINS": _items("FD_PLUGINS", None),
    "FD_API_KEY": _items("FD_API_KEY", []),
    "FD_DETERMINISTIC_SPLIT_KV_SIZE": _split_kv_size,
    "FD_CONFIG_ROOT": _config_root,
    "FD_ZMQ_SNDHWM": lambda environ: environ.get("FD_ZMQ_SNDHWM", 0),
    "FD_NVFP4_GEMM_BACKEND": lambda environ: environ.get("FD_NVFP4_MOE_BACKEND"),
    "FD_USAGE_STATS_SERVER": lambda environ: environ.get("FD_USAGE_STATS_SERVER", "http://10.0.0.1/usage"),
    "DO_NOT_TRACK": lambda environ: environ.get("DO_NOT_TRACK", "0") == "1",
}

VALUES: dict[str, tuple[str, ...]] = {
    "FD_CPU_USE_BF16": ("True", "False"),
    "FD_BUILDING_ARCS": ("[80,90]", "[80, 90]", "[]"),
    "FD_LOG_DIR": ("/var/log/fd", "~/log", "a/./b/"),
    "FD_LOG_LEVEL": ("INFO", "DEBUG"),
    "FD_LOG_REQUESTS_LEVEL": ("0", "3", " 1 "),
    "FD_LOG_MAX_LEN": ("0", "100000"),
    "FD_TRACE": ("off", "local", "otel", "all"),
    "FD_LOG_BACKUP_COUNT": ("0", "07", "30"),
    "FD_MODEL_SOURCE": ("AISTUDIO", "MODELSCOPE", "HUGGINGFACE"),
    "FD_MODEL_CACHE": ("/models",),
    "FD_MAX_STOP_SEQS_NUM": ("5", "64"),
    "FD_STOP_SEQS_MAX_LEN": ("8", "1_000"),
    "CUDA_VISIBLE_DEVICES": ("0", "0,1,2", "GPU-1,GPU-2", "-1"),
    "FD_ZMQ_SNDHWM": ("0", "10000"),
    "FD_CACHE_PARAMS": ("none", "/params"),
    "FD_ATTENTION_BACKEND": ("NATIVE_ATTN", "APPEND_ATTN", "MLA_ATTN"),
    "FD_SAMPLING_CLASS": ("base", "base_non_truncated", "air", "rejection"),
    "FD_MOE_BACKEND": ("cutlass", "marlin", "triton", "flashinfer-cutlass", "flashinfer-trtllm"),
    "FD_MOE_MXFP4_BACKEND": ("flashinfer",),
    "FD_TRITON_KERNEL_CACHE_DIR": ("/tmp/triton",),
    "TRACES_ENABLE": ("true", "false"),
    "FD_SERVICE_NAME": ("x", "two words"),
    "FD_HOST_NAME": ("node-1",),
    "TRACES_EXPORTER": ("console", "otlp"),
    "EXPORTER_OTLP_ENDPOINT": ("http://collector:4317", "collector:4317"),
    "EXPORTER_OTLP_HEADERS": ("authorization=Bearer x",),
    "FD_ENC_DEC_BLOCK_NUM": ("0", "4"),
    "FD_PLUGINS": ("one", "one,two"),
    "FD_JOB_ID": ("17",),
    "FD_SUPPORT_MAX_CONNECTIONS": ("1", "4096"),
    "FD_TP_GROUP_GID_OFFSET": ("0", "2000"),
    "FD_CONSOLE_DECODE_LOG_INTERVAL": ("1", "50"),
    "FD_ZMQ_RECV_REQUEST_SERVER_PORT": ("8200", "65535"),
    "FD_ZMQ_SEND_RESPONSE_SERVER_PORT": ("8201",),
    "FD_ZMQ_RECV_REQUEST_SERVER_PORTS": ("8200", "8200,8210"),
    "FD_ZMQ_SEND_RESPONSE_SERVER_PORTS": ("8201,8211",),
    "FD_ZMQ_CONTROL_CMD_SERVER_PORTS": ("8202", "8202,8212"),
    "FD_EP_MAX_PREFETCH_TASK_NUM": ("0", "16"),
    "FD_LIMIT_THINKING_CONTENT_TRUNCATE_STR": ("</think>", "\n</think>\n\n"),
    "FD_CACHE_PROC_EXIT_TIMEOUT": ("0", "60"),
    "FD_CACHE_PROC_ERROR_COUNT": ("1", "20"),
    "FD_API_KEY": ("k1", "k1,k2"),
    "ENCODE_FEATURE_BOS_AK": ("ak",),
    "ENCODE_FEATURE_BOS_SK": ("sk",),
    "ENCODE_FEATURE_ENDPOINT": ("bj.bcebos.com", "https://bj.bcebos.com"),
    "FD_FILL_BITMASK_BATCH": ("1", "8"),
    "FD_LLGUIDANCE_LOG_LEVEL": ("0", "2"),
    "FD_HPU_CHUNK_SIZE": ("32", "128"),
    "FD_PREFILL_WAIT_DECODE_RESOURCE_SECONDS": ("0", "120"),
    "DO_NOT_TRACK": ("0", "1"),
    "FD_USAGE_STATS_SERVER": ("http://stats.example/usage",),
    "FD_USAGE_SOURCE": ("ci",),
    "FD_CONFIG_ROOT": ("~/x", "/etc/fd"),
    "FMQ_CONFIG_JSON": ('{"a": 1}',),
    "FD_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS": ("1", "1000"),
    "FD_OTLP_EXPORTER_MAX_EXPORT_BATCH_SIZE": ("1", "512"),
    "FD_TOKEN_PROCESSOR_HEALTH_TIMEOUT": ("0", "1.5", "120", "1e2"),
    "FD_XPU_MOE_FFN_QUANT_TYPE_MAP": ("0-3:w8a8",),
    "FD_RESERVE_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL": ("0", "32"),
    "FD_RESERVE_DECAY_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL": ("0", "0.1"),
    "FD_RESERVE_MIN_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL": ("0", "4"),
    "FD_WORKER_ALIVE_TIMEOUT": ("0", "60"),
    "FILE_BACKEND_STORAGE_DIR": ("/data",),
    "FD_CUSTOM_AR_MAX_SIZE_MB": ("1", "64"),
    "FD_DETERMINISTIC_SPLIT_KV_SIZE": ("1", "16", "4096"),
}
"""Texts to test the readers with, for every variable but flags."""
