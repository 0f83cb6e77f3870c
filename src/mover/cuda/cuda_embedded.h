/* Data that cmake/embed.cmake puts into the library: the kernels' source, and the machine code that
 * nvcc made of it where the library was built (else empty). */
#pragma once

/* XX(variable, the name under which sources include it) */
#define DRAY__GPU_HEADERS(XX)                                                                      \
    XX(dray__gpu_source_device, "mover/cuda/cuda_device.h")                                        \
    XX(dray__gpu_source_delta, "mover/cuda/cuda_delta.h")                                          \
    XX(dray__gpu_source_floats, "mover/kernels/floats.h")                                          \
    XX(dray__gpu_source_formats, "mover/kernels/formats.h")                                        \
    XX(dray__gpu_source_groups, "mover/cuda/cuda_groups.h")                                        \
    XX(dray__gpu_source_quant, "mover/cuda/cuda_quant.h")                                          \
    XX(dray__gpu_source_header, "mover/cuda/cuda_kernels.h")

#define XX(variable, name)                                                                         \
    extern const unsigned char variable[];                                                         \
    extern const unsigned long variable##_size;
DRAY__GPU_HEADERS(XX)
#undef XX
extern const unsigned char dray__gpu_source[], dray__gpu_built[];
extern const unsigned long dray__gpu_source_size, dray__gpu_built_size;
