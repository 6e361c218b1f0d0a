"""Environment variables of every vLLM in these tests. Set before torch or vllm is imported."""

from __future__ import annotations

COMMON = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; without it vLLM asks for most of the machine
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # One thread: sums in one order, so that equal prompts give equal tokens; and nothing that
    # spins while the store or another process wants the core.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

IN_PROCESS = {**COMMON, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

# A server's own: it may be reset over HTTP, and its log is read by tests.
SERVER = {**COMMON, "VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
