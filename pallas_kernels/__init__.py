"""Paged attention: arrays in, arrays out. Knows pages and batches, nothing of models or requests."""

from pallas_kernels.batch import PagedBatch, check_batch
from pallas_kernels.dispatch import paged_attention
from pallas_kernels.pages import copy_blocks, init_pages, storage_dtype, write_kv

__all__ = [
    "PagedBatch",
    "check_batch",
    "copy_blocks",
    "init_pages",
    "paged_attention",
    "storage_dtype",
    "write_kv",
]
