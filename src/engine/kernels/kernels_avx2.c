/* Compiled for machines with AVX2 (CMakeLists.txt gives the flags). */
#define KERNELS dray__arithmetic_avx2
#define KERNELS_NAME "avx2"
#include "engine/kernels/body.h"
