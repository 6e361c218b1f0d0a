"""What pyproject.toml cannot say in a stable way: the optional compiled modules.

Without a C compiler the package is built without them, and does the same more slowly.
`EBBTIDE_PURE=1` builds a wheel for every platform.
"""

import os

from setuptools import Extension, setup

# pthread: of a C library that has it apart.
COMPILED = [
    Extension(
        f"ebbtide.{room}._{name}",
        [f"src/ebbtide/{room}/{name}.c"],
        extra_compile_args=["-O3", "-pthread"],
        extra_link_args=["-pthread"],
        py_limited_api=True,
        optional=True,
    )
    for room, name in (
        ("allocator", "block_hash"),
        ("kernels", "host_copy"),
        ("tiers", "slab_io"),
    )
]

setup(
    ext_modules=[] if os.environ.get("EBBTIDE_PURE") == "1" else COMPILED,
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
