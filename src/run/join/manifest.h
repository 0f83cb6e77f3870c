/* A job for other programs: as JSON (`dray run --print job`), and as a JobSet for Kubernetes. */
#pragma once

#include "run/run.h"

#include <jansson.h>

typedef struct dray__manifest_options {
    const char *job; /* the file */
    const char *const *settings;
    uint32_t setting_count;
    const char *out;   /* the run's folder; NULL for runs/NAME beside the job file */
    const char *image; /* of the containers, which has dray and the programs of the roles */
} dray__manifest_options;

/* Makes the resolved job as a new JSON object, as in config.json of its run. */
int dray__manifest_job(const dray__manifest_options *options, json_t **out, dray_error *error);
/* A JobSet (sigs.k8s.io/jobset, API version jobset.x-k8s.io/v1alpha2, its types of version 0.9): a
 * replicated job `run`, and one for each role that leaves places to other hosts, with one Job for
 * each place. They share the volume claim NAME-data, mounted where the job file is, and the secret
 * NAME-tokens. */
int dray__manifest_k8s(const dray__manifest_options *options, json_t **out, dray_error *error);
