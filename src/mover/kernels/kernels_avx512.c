/* Compiled for machines with AVX-512 F, BW, VL, DQ (CMakeLists.txt gives the flags). */
#define KERNELS dray__kernels_avx512
#define KERNELS_NAME "avx512"
#include "mover/kernels/kernels_body.h"
