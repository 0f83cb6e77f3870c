/* Subscribers whose engine has a load function for full named tensors (dray_load_options). The
 * tensors are divided into rounds. Each round is one region of a layout that is made here. All of
 * these regions are the same bucket: it is filled by the update's routes and given to the engine,
 * round after round. */
#pragma once

#include "weights/internal.h"

typedef struct dray__load dray__load;

/* *layout: the tensors of `given` except aliases, in rounds; the caller frees it. */
int dray__load_open(const dray_layout *given, const dray_load_options *options, dray__load **out,
                    dray_layout **layout, dray_error *error);
void dray__load_close(dray__load *load); /* NULL is fine */

uint32_t dray__load_rounds(const dray__load *load);
/* Returns the bytes of staging that routes may use beside the bucket. */
uint64_t dray__load_staging(const dray__load *load);

/* Allocates the bucket for one update, and makes it the memory of the destination's regions. */
int dray__load_begin(dray__load *load, const dray__destination *destination, dray_error *error);
void dray__load_end(dray__load *load, const dray__destination *destination);
uint64_t dray__load_held_bytes(const dray__load *load);
/* Gives the tensors of a round to the engine. */
int dray__load_deliver(dray__load *load, const dray__destination *destination, uint32_t round,
                       uint64_t version, dray_error *error);
