/* Turns of engines that take weights, where the schedule has them (schedule.h, in_turns): while
 * some take theirs, the others make as much as is trained. At most max(1, floor(E (1 - T / R))) of
 * E engines are out at once, where T and R are samples a second that are trained, and that all
 * engines together can make. An engine measures both: T by how fast versions come, R by its own
 * samples. A turn is a lease (dray/lease.h), so that it ends with its engine. On rank 0 alone. */
#pragma once

#include "run/host/host.h"

typedef struct dray__engine_turns dray__engine_turns;

int dray__engine_turns_open(dray__host *host, dray__engine_turns **out, dray_error *error);
void dray__engine_turns_close(dray__engine_turns *turns);
/* This engine has made so many samples in so many nanoseconds, without its waits. */
void dray__engine_turns_made(dray__engine_turns *turns, uint32_t samples, int64_t took_ns);
/* Begins a turn, if there is one free now; with `wait` as soon as there is. *begun: whether it did,
 * or the schedule has no turns, or one has begun already. */
int dray__engine_turns_begin(dray__engine_turns *turns, bool wait, bool *begun, dray_error *error);
/* Ends it: the version was taken. */
void dray__engine_turns_end(dray__engine_turns *turns, int64_t version);
