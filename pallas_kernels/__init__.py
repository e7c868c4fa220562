"""Paged attention: arrays in, arrays out. Knows pages and batches, nothing of models or requests."""

from pallas_kernels.batch import PagedBatch, check_batch
from pallas_kernels.cpu.library import settle_memory
from pallas_kernels.dispatch import (
    available_backends,
    copy_blocks,
    describe_backend,
    paged_attention,
    rotate_and_write,
    write_kv,
)
from pallas_kernels.pages import KVPages, init_pages, page_shapes, rotate
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.storage import KV_DTYPES, storage_dtype

__all__ = [
    "KV_DTYPES",
    "AttentionSpec",
    "KVPages",
    "PagedBatch",
    "available_backends",
    "check_batch",
    "copy_blocks",
    "describe_backend",
    "init_pages",
    "page_shapes",
    "paged_attention",
    "rotate",
    "rotate_and_write",
    "settle_memory",
    "storage_dtype",
    "write_kv",
]
