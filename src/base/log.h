#pragma once

#include <dray/dray.h>

/* Writes one line to the process's log callback, if there is one. */
void dray__log(dray_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));
