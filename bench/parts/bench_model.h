/* Models that are cut down to the machine's memory, and the sides of an update, from SPECs. */
#pragma once

#include "bench/weights/bench_cluster.h"

/* Loads the first `layers` layers of a model and a proportional part of its vocabulary. 0 layers
 * means the whole model. */
void bench_model(bench *b, const char *name, int64_t layers, dray_model_config *out);
/* Returns the largest number of layers whose checkpoint has at most `bytes`; at least 1. */
int64_t bench_layers_within(bench *b, const char *name, double bytes);
/* Opens a side from SPEC[@GPU[,GPU...]][@HOST[,HOST...]]. bench_side_close frees it. A wrong SPEC
 * ends the program. */
void bench_side_open(bench *b, const dray_model_config *model, const char *spec, bench_side *out);
void bench_side_close(bench_side *side);
/* Returns the bytes of the regions of a side's layouts. */
double bench_side_bytes(const bench_side *side);
/* Returns the machine's MemAvailable, in bytes. */
double bench_memory(void);
