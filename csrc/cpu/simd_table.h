// For the files that setup.py compiles once per instruction set, AMPCTX_SIMD_NAME naming it: the names of their tables.
//
// Everything else in them is static, and nothing is included that defines functions with external linkage: the linker
// would keep one copy of such a function for all instruction sets (functors/host_device.h).
#pragma once

#define AMPCTX_QUOTE_(name) #name
#define AMPCTX_QUOTE(name) AMPCTX_QUOTE_(name)
#define AMPCTX_TABLE__(table, name) table##_##name
#define AMPCTX_TABLE_(table, name) AMPCTX_TABLE__(table, name)
#define AMPCTX_TABLE(table) AMPCTX_TABLE_(table, AMPCTX_SIMD_NAME)

// An output is the very tensor that is an input, or does not touch it: no iteration depends on another.
#ifdef __clang__
#define AMPCTX_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define AMPCTX_INDEPENDENT _Pragma("GCC ivdep")
#endif
