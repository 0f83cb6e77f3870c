/* Bytes in pinned host memory that ranks on several GPUs of one host want. PCIe is slow, NVLink is
 * not: the ranks that update together (a cohort, cohort.h) share the bytes out, each uploads its
 * part once, and the others take it from that rank's GPU.
 *
 * A part comes in rounds. A rank says in its progress, a page of shared memory that the others have
 * mapped, which rounds of a run are in its memory; nobody uploads anything later than his own
 * parts, and those wait for nobody, so that no wait can close a circle. Who gives up says so there,
 * who dies is seen to, who says nothing for a while is not waited for: what was his to upload the
 * others then read themselves, out of the pinned memory, which they reach as well. */
#pragma once

#include "weights/internal.h"

int dray__progress_new(dray_region **out, dray_error *error);
/* Unless all rounds of the run were entered, they never will be. progress NULL is fine. */
void dray__progress_end(dray_region *progress, uint64_t run);

/* Who uploads what: kept with the sources while there is anything to share. */
typedef struct dray__upload dray__upload;
void dray__upload_forget(void *upload);
static inline dray__upload *dray__upload_of(const dray__sources *sources) /* NULL: nothing */
{
    return dray__kept_find(sources->kept, dray__upload_forget);
}

/* Finds out, of sources with all of the cohort's layouts. They and the destination are borrowed. */
int dray__upload_find(dray__sources *sources, const dray__destination *destination,
                      dray_error *error);
/* Is something taken from this member of the cohort? */
bool dray__upload_wants(const dray__upload *upload, uint32_t member);
/* Nothing is: it cannot be reached. */
void dray__upload_lose(dray__upload *upload, uint32_t member);
