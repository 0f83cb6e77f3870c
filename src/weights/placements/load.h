/* Subscribers whose engine takes full named tensors (weights.h: dray_load_options). The tensors are
 * dealt to rounds; each round is one region of a layout of our own, and all of these regions are
 * one bucket, which is filled by whatever lanes there are and handed over, round after round. */
#pragma once

#include "weights/internal.h"

typedef struct dray__load dray__load;

/* options: as read. *layout: the caller's to free; given's tensors but for aliases, in rounds. */
int dray__load_open(const dray_layout *given, const dray_load_options *options, dray__load **out,
                    dray_layout **layout, dray_error *error);
void dray__load_close(dray__load *load); /* NULL is fine */

uint32_t dray__load_rounds(const dray__load *load);
/* What lanes may hold beside the bucket. */
uint64_t dray__load_staging(const dray__load *load);

/* For the time of one update: the bucket, behind all of the destination's regions. */
int dray__load_begin(dray__load *load, const dray__destination *destination, dray_error *error);
void dray__load_end(dray__load *load, const dray__destination *destination);
uint64_t dray__load_held_bytes(const dray__load *load);
/* Hands a round over. */
int dray__load_deliver(dray__load *load, const dray__destination *destination, uint32_t round,
                       uint64_t version, dray_error *error);
