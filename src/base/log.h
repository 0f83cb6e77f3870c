#pragma once

#include <dray/dray.h>

/* One line to the process's log callback; nothing when there is none. */
void dray__log(dray_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));
