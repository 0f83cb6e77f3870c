/* Bytes in pinned host memory that ranks on several GPUs of one host want. PCIe is slow, NVLink is
 * not: the ranks that update together (a cohort, cohort.h) share the bytes out, each uploads its
 * part once, and the others take it from that rank's GPU.
 *
 * A part comes in rounds. A rank says on its board, a page of shared memory that the others have
 * mapped, which rounds of a run are in its memory; nobody uploads anything later than his own
 * parts, and those wait for nobody, so that no wait can close a circle. Who gives up says so there,
 * who dies is seen to, who says nothing for a while is not waited for: what was his to upload the
 * others then read themselves, out of the pinned memory, which they reach as well. */
#ifndef DRAY_WEIGHTS_FAN_H
#define DRAY_WEIGHTS_FAN_H

#include "weights/cohort.h"
#include "weights/program.h"

enum { DRAY__FAN_ROUNDS = 4 };

/* ---- the board ------------------------------------------------------------------------------- */

enum dray__fan_news { DRAY__FAN_NOT_YET, DRAY__FAN_HERE, DRAY__FAN_GIVEN_UP };

int dray__fan_board_new(dray_region **out, dray_error *error);
void dray__fan_board_begin(dray_region *board, uint64_t run);
/* A round of the run that was begun is in this rank's memory. */
void dray__fan_board_enter(dray_region *board, uint32_t round);
/* Unless all rounds of the run were entered, they never will be. board NULL is fine. */
void dray__fan_board_end(dray_region *board, uint64_t run);
enum dray__fan_news dray__fan_look(const dray_region *board, uint64_t run, uint32_t round);

/* ---- who uploads what ------------------------------------------------------------------------ */

typedef struct dray__fan dray__fan;

/* *out NULL: there is nothing to share. The sources, with all of the cohort's layouts, and the
 * destination are borrowed until free. */
int dray__fan_new(const dray__sources *sources, const dray__destination *destination,
                  dray__fan **out, dray_error *error);
void dray__fan_free(dray__fan *fan); /* NULL is fine. Before regions that it reads end. */
/* Is something taken from this member of the cohort? */
bool dray__fan_wants(const dray__fan *fan, uint32_t member);
/* Nothing is: it cannot be reached. */
void dray__fan_lose(dray__fan *fan, uint32_t member);
/* Is this op's source pinned memory, which may be shared out? */
bool dray__fan_takes(const dray__haul *haul, const dray__op *op);

/* What is taken from one member in one round. */
typedef struct dray__fan_turn {
    uint32_t member, round, step; /* step: of the program */
    uint64_t bytes;
} dray__fan_turn;

/* Steps 0 to ROUNDS - 1 upload what is this rank's, what nobody shares in the last of them; each
 * turn has one of its own. */
typedef struct dray__fan_program {
    dray__program *program;
    dray__fan_turn *turns;
    uint32_t turn_count;
    bool covers; /* all that others expect of this rank is uploaded */
} dray__fan_program;

/* As of an earlier update, or compiled now; the fan's. */
int dray__fan_find(dray__fan *fan, const dray__haul *haul, const uint64_t *ops, uint64_t count,
                   const dray__fan_program **out, dray_error *error);
/* One step that uploads what the turns of which `instead` says so would have taken. *out is the
 * caller's (dray__program_free). */
int dray__fan_instead(dray__fan *fan, const dray__haul *haul, const uint64_t *ops, uint64_t count,
                      const bool *instead, dray__program **out, dray_error *error);
static inline uint32_t dray__fan_turn_of(uint32_t member, uint32_t round)
{
    return member * DRAY__FAN_ROUNDS + round;
}

#endif
