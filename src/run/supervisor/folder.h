/* A run's folder:
 *   config.yaml    the job as resolved, itself a job file
 *   config.json    the same, for programs
 *   metrics.jsonl  one object a step
 *   events.jsonl   other events; report.html is a page of both
 *   checkpoints/   step-N: a Hugging Face checkpoint with the trainer's state
 *   weights/       versions for engines that update from disk
 *   logs/          one file a process
 *   trace/, trace.json
 *   run.json       for hosts that join: the run's identity and address, and its number of starts
 *   tokens/ also for them: the tokens of roles, and the master token
 *   .lock, *.socket while it runs */
#pragma once

#include "run/job/job.h"
#include "run/run.h"

#include <jansson.h>
#include <limits.h>

typedef struct dray__folder {
    char path[PATH_MAX / 2]; /* absolute */
    char sockets[80];        /* folder of the sockets: the run's, or a short one in /tmp */
    bool own_sockets;
    int lock;
    int64_t first_step; /* 0, or the checkpoint that is resumed from */
    char id[20];        /* identity of the run; "" when no other hosts may join it */
    int64_t epoch;      /* how often it was started */
    bool resumed;
    int64_t eval_from; /* the first version whose held-out accuracy is still to be measured */
    json_t *rows;      /* resumed: rows of metrics.jsonl that stay, as an array */
    json_t *held; /* resumed: the row of first_step, to be completed by an evaluation; or NULL */
} dray__folder;

/* Makes a new folder, or opens an earlier run's: reads the job, chooses the checkpoint, truncates
 * metrics.jsonl after its step. Returns 0, DRAY_EEXIST when the folder has a run already, or
 * DRAY_EBUSY when that run is running. */
int dray__folder_open(const dray__run_options *options, dray__folder *out, dray__job **job,
                      dray_error *error);
void dray__folder_close(dray__folder *folder);
/* A joined host's own folder: config.yaml, config.json, logs/ and trace/. The folder `path` must
 * exist. */
int dray__folder_of_guest(dray__folder *out, const char *path, const dray__job *job,
                          const char *resolved, dray_error *error);
/* Makes a path below the folder. */
void dray__folder_path(const dray__folder *folder, const char *name, char out[PATH_MAX]);
/* Gets the step of the checkpoint that a run resumes from, which is the newest one. Returns 0, or
 * DRAY_ENOENT when there is none. */
int dray__folder_checkpoint(const dray__folder *folder, int64_t *step, dray_error *error);
/* Replaces a file of rows. */
int dray__folder_write_rows(const dray__folder *folder, const char *name, const json_t *rows,
                            dray_error *error);
/* The file with the row that waits for its evaluation. */
#define DRAY__ROWS_PENDING ".metrics.pending"
bool dray__job_eval_due(const dray__job *job, int64_t step);
