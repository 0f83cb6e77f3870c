/* Models cut down to what the machine's memory holds, and the sides of an update from SPECs. */
#pragma once

#include "bench/weights/bench_cluster.h"

/* Loads a model; `layers` of its layers and as large a part of its vocabulary; 0: all of it. */
void bench_model(bench *b, const char *name, int64_t layers, dray_model_config *out);
/* The most layers whose checkpoint has at most `bytes`; at least 1. */
int64_t bench_layers_within(bench *b, const char *name, double bytes);
/* SPEC[@GPU[,GPU...]][@HOST[,HOST...]]. */
void bench_side_open(bench *b, const dray_model_config *model, const char *spec, bench_side *out);
void bench_side_close(bench_side *side);
/* Bytes of memory behind a side's layouts. */
double bench_side_bytes(const bench_side *side);
/* MemAvailable of the machine. */
double bench_memory(void);
