/* Paths and files of runs and studies. */
#pragma once

#include <dray/dray.h>
#include <stddef.h>
#include <stdint.h>

/* snprintf for paths; run folders are short enough (folder.c) that none is cut. */
void dray__path(char *out, size_t capacity, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* A checkpoint's folder below the run's: "checkpoints/step-000007". */
void dray__checkpoint_path(const char *folder, int64_t step, char *out, size_t capacity);

/* Makes a folder and those above it; those that are there stay. */
int dray__make_folders(const char *path, dray_error *error);
/* Holds the folder's lock until *lock is closed. `what` names the holder, such as "a run". Returns
 * 0, or DRAY_EBUSY when another process holds it. */
int dray__lock_folder(const char *folder, const char *what, int *lock, dray_error *error);
/* Writes a file into the folder, whole or not at all. */
int dray__write_text(const char *folder, const char *name, const char *text, dray_error *error);
/* Returns 0, or DRAY_EINVALID when the name of a job cannot name a folder. `what` is the kind of
 * object: "run". */
int dray__folder_name_check(const char *name, const char *what, dray_error *error);
