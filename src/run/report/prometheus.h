/* A coordinator's status as metrics. */
#pragma once

#include <jansson.h>
#include <stdio.h>

/* Prints the result of dray_context_status in the text format of Prometheus. */
void dray__prometheus(json_t *status, FILE *out);
