// Names the tables of the files that setup.py compiles once per instruction set (AMPCTX_SIMD_NAME).
//
// Everything else in these files is static. They include no function with external linkage, of which the linker would
// keep one copy for all instruction sets (functors/host_device.h).
#pragma once

#define AMPCTX_QUOTE_(name) #name
#define AMPCTX_QUOTE(name) AMPCTX_QUOTE_(name)
#define AMPCTX_TABLE__(table, name) table##_##name
#define AMPCTX_TABLE_(table, name) AMPCTX_TABLE__(table, name)
#define AMPCTX_TABLE(table) AMPCTX_TABLE_(table, AMPCTX_SIMD_NAME)

// An output is an input or does not overlap one, so no iteration depends on another.
#ifdef __clang__
#define AMPCTX_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define AMPCTX_INDEPENDENT _Pragma("GCC ivdep")
#endif
