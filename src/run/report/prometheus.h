/* A coordinator's status as metrics. */
#ifndef DRAY_RUN_PROMETHEUS_H
#define DRAY_RUN_PROMETHEUS_H

#include <jansson.h>
#include <stdio.h>

/* Prints what dray_context_status returns in the text format of Prometheus. */
void dray__prometheus(json_t *status, FILE *out);

#endif
