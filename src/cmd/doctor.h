/* What `dray doctor` says of GPUs, behind its own checks. Nothing where there is none. */
#pragma once

#include <stdbool.h>

/* measure: copies over each link, too. */
void doctor_gpus_table(bool measure);
void doctor_gpus_json(bool measure); /* objects with the keys of the checks */
