/* A coordinator's status as metrics. */
#pragma once

#include <jansson.h>
#include <stdio.h>

/* Prints what dray_context_status returns in the text format of Prometheus. */
void dray__prometheus(json_t *status, FILE *out);
