"""What pyproject.toml cannot say in a stable way: the optional compiled hasher.

Without a C compiler the package is built without it, and does the same more slowly.
`EBBTIDE_PURE=1` builds a wheel for every platform.
"""

import os

from setuptools import Extension, setup

COMPILED = Extension(
    "ebbtide.allocator._block_hash",
    ["src/ebbtide/allocator/block_hash.c"],
    extra_compile_args=["-O3"],
    py_limited_api=True,
    optional=True,
)

setup(
    ext_modules=[] if os.environ.get("EBBTIDE_PURE") == "1" else [COMPILED],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
