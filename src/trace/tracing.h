/* Spans on paths that are taken often. Nothing is called while tracing is off. */
#pragma once

#include <dray/trace.h>
#include <stdatomic.h>

extern atomic_bool dray__tracing; /* recorder.c */

/* DRAY__TRACE(enter(DRAY_SPAN_TRANSFER, "queue put", -1)): dray_trace_enter. */
#define DRAY__TRACE(call)                                                                          \
    do                                                                                             \
        if (atomic_load_explicit(&dray__tracing, memory_order_relaxed))                            \
            dray_trace_##call;                                                                     \
    while (0)
