/* Compiled for machines that have AVX-512 IFMA beside F, BW, VL, DQ (CMakeLists.txt gives the
 * flags). */
#define KERNELS dray__kernels_avx512ifma
#define KERNELS_NAME "avx512ifma"
#include "mover/kernels/kernels_body.h"
