/* Compiled for machines with AVX2 and F16C (CMakeLists.txt gives the flags). */
#define KERNELS dray__kernels_avx2
#define KERNELS_NAME "avx2"
#include "mover/kernels/kernels_body.h"
