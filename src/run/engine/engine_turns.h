/* Turns in which engines take weights, where the schedule asks for them (schedule.h, in_turns):
 * while some engines update, the others make as many samples as are trained. At most max(1, floor(E
 * (1 - T / R))) of E engines update at once. T is the number of samples trained per second, R the
 * number that all engines together can make per second. An engine measures both: T by how fast
 * versions come, R by its own samples. A turn is a lease (dray/lease.h), so it ends when its engine
 * does. All functions are called on rank 0 alone. */
#pragma once

#include "run/host/host.h"

typedef struct dray__engine_turns dray__engine_turns;

int dray__engine_turns_open(dray__host *host, dray__engine_turns **out, dray_error *error);
void dray__engine_turns_close(dray__engine_turns *turns);
/* Records that this engine made `samples` samples in took_ns, its waits left out. */
void dray__engine_turns_made(dray__engine_turns *turns, uint32_t samples, int64_t took_ns);
/* Begins a turn if one is free now; with `wait`, as soon as one is free. *begun is true when it
 * did, and also when the schedule has no turns or a turn has begun already. */
int dray__engine_turns_begin(dray__engine_turns *turns, bool wait, bool *begun, dray_error *error);
/* Ends the turn after `version` was taken. */
void dray__engine_turns_end(dray__engine_turns *turns, int64_t version);
