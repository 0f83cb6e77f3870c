/* What cmake/embed.cmake puts into the library: the kernels' source, and what nvcc made of it
 * where the library was built (else empty). */
#pragma once

extern const unsigned char dray__gpu_source[], dray__gpu_source_device[], dray__gpu_source_delta[],
    dray__gpu_source_quant[], dray__gpu_source_header[];
extern const unsigned long dray__gpu_source_size, dray__gpu_source_device_size,
    dray__gpu_source_delta_size, dray__gpu_source_quant_size, dray__gpu_source_header_size;
extern const unsigned char dray__gpu_built[];
extern const unsigned long dray__gpu_built_size;
