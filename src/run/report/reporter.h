/* src/run/report/: the reports of a run. reporter.c receives the roles' reports, rows.c makes rows
 * of metrics.jsonl of them, spent.c adds the seconds of each state, and view.c shows the run to a
 * person. prometheus.c writes a coordinator's status as metrics, and metrics.c serves them over
 * HTTP (http.c), as live.c serves the page of the run.
 *
 * The supervisor's second thread: watches the reports of the roles, writes metrics.jsonl, and keeps
 * the view of the run up to date. */
#pragma once

#include "run/report/view.h"

typedef struct dray__reporter dray__reporter;

/* The kind of the report that the reporter posts when it has all of a step's row. The trainer waits
 * for it before a checkpoint (trainer/checkpoint.c). */
#define DRAY__REPORT_ROW "row"

/* address is the coordinator's, which must be up. *url is the address of the live page, valid until
 * the stop; NULL when there is none. */
int dray__reporter_start(const dray__folder *folder, const dray__job *job, const char *address,
                         bool json, dray__reporter **out, const char **url, dray_error *error);
/* Takes the reports that are still at the coordinator (if that is running), writes the pending
 * rows, and ends the thread. The numbers of *rows for the summary stay valid until
 * dray__reporter_free. */
int dray__reporter_stop(dray__reporter *reporter, dray_error *error);
void dray__reporter_free(dray__reporter *reporter); /* NULL is fine */

/* For the supervisor's thread, at any time. */
int64_t dray__reporter_heard_ns(dray__reporter *reporter);  /* when the last report came */
uint64_t dray__reporter_progress(dray__reporter *reporter); /* grows with each step and eval */
bool dray__reporter_ready(dray__reporter *reporter);        /* the first version is published */
void dray__reporter_say(dray__reporter *reporter, const char *event, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Returns the error of a row that could not be written, or DRAY_OK. */
int dray__reporter_failed(dray__reporter *reporter, dray_error *error);

/* Prints the last lines. Call it after dray__reporter_stop. */
void dray__reporter_summary(dray__reporter *reporter, const dray__folder *folder,
                            const char *outcome);
