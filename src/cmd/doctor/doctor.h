/* src/cmd/doctor/: the checks of `dray doctor` (doctor.c), and its tables about GPUs, which follow
 * the checks on a machine with GPUs (doctor_gpu.c). */
#pragma once

#include <stdbool.h>

/* With `measure`, also times copies over each link. */
void doctor_gpus_table(bool measure);
void doctor_gpus_json(bool measure); /* objects with the keys of the checks */
