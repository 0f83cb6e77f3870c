/* Devices of roles (`devices:`), and the leases by which roles that share one take turns. */
#pragma once

#include "run/job/job.h"

#include <dray/lease.h>

enum { DRAY__DEVICES_MAX = DRAY_LEASE_NAMES };

typedef struct dray__devices {
    const char *kind; /* "cpu", "cuda" */
    uint32_t count;
    uint32_t numbers[DRAY__DEVICES_MAX];
} dray__devices;

/* Reads "cpu:0", "cuda:0-1", "cuda:0,2" or "" for none. The result is for `part` of `parts`: its
 * equal share of the list, or all of it when the list cannot be divided. Returns 0, or
 * DRAY_EINVALID with the error in the text. */
int dray__devices_read(const char *text, uint32_t part, uint32_t parts, dray__devices *out,
                       dray_error *error);
/* Returns 0 when this machine has each of the devices, or DRAY_ENOENT, which says how many there
 * are. */
int dray__devices_look(const dray__devices *devices, dray_error *error);

enum { DRAY__LEASES_BYTES = 4096 };
/* Writes $DRAY_LEASES of an instance: names with commas between them, one for each of its devices
 * that another role has, too. In "engine+trainer/cuda:0", the tokens of these two roles may take
 * the lease. */
void dray__devices_leases(const dray__job *job, const dray__job_role *role, uint32_t instance,
                          char out[DRAY__LEASES_BYTES]);
