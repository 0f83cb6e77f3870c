/* The files that a joined host sends to the run: its logs, as they grow, and its files of spans. A
 * file of spans has its process's account in its head, which changes all the time
 * (trace/account.h). The head is sent whenever it has changed, with the difference of this host's
 * clock from the run's. */
#pragma once

#include <dray/dray.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct dray__host_files dray__host_files;

int dray__host_files_open(const char *folder, dray__host_files **out, dray_error *error);
void dray__host_files_close(dray__host_files *files); /* NULL is fine */

typedef struct dray__host_files_part {
    json_t *list; /* [{name, at, size}] */
    uint8_t *bytes;
    uint64_t size, room;
    bool more; /* there is more than was taken, of files that the run can write */
} dray__host_files_part;

/* Takes the new bytes in logs/ and trace/, at most about 4 MiB. clock_ns is added to this host's
 * clock to get the run's; error_ns is its greatest error. `out` is zeroed, or the part of the
 * previous call. The bytes count as sent when dray__host_files_took is called; otherwise the next
 * call takes them again, and also those of the files in `unkept` (an array of names, or NULL). */
int dray__host_files_take(dray__host_files *files, int64_t clock_ns, int64_t error_ns,
                          dray__host_files_part *out, dray_error *error);
void dray__host_files_took(dray__host_files *files, const json_t *unkept);
void dray__host_files_part_free(dray__host_files_part *part);

/* Returns whether the file in logs/ or trace/ is one of the processes with this label:
 * "LABEL-RANK.log", "LABEL-RANK-EPOCH.spans" or ".lengths". The name of another role may begin with
 * the label and '-', too. */
bool dray__host_file_is_of(const char *name, const char *label);

/* On the run's host: writes a part of a file of the run's folder. name: "logs/engine-0.log",
 * checked by the caller. */
int dray__host_files_put(const char *folder, const char *name, const void *bytes, size_t size,
                         int64_t at, dray_error *error);
