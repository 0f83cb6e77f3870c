/* Whole reads and writes, which go on after a signal or the file system cut them short, and
 * names in a folder. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/types.h>

/* Return 0, or -1 with errno, which is EIO when the file ends too early. */
int dray__read_at(int fd, void *data, size_t size, off_t at);
int dray__write_all(int fd, const void *data, size_t size);
/* Copies the rest of one file to the other. Returns 0, or -1 with errno. */
int dray__copy_rest(int from, int to);
/* Opens a file in the folder or beneath it, close-on-exec, as open(2) does. "..", absolute paths
 * and symbolic links are refused. Where the kernel has no openat2 (before 5.6), `name` may not
 * have slashes. Returns -1 with errno. */
int dray__open_beneath(int folder, const char *name, int flags, mode_t mode);
/* fopen of "r", "w" or "a", close-on-exec. Fails with ELOOP when the path ends in a symbolic link,
 * so that links that others put into our folders are not followed. */
FILE *dray__open_stream(const char *path, const char *mode);
/* Reads the rest of a stream and closes it; `path` is its name for messages. When `file` is NULL,
 * errno is the reason (DRAY_ENOENT, DRAY_ESYS). *out is malloc'ed and ends with a zero. Fails with
 * DRAY_EFORMAT when there are more than `most` bytes. */
int dray__read_stream(FILE *file, const char *path, size_t most, char **out, size_t *size,
                      dray_error *error);
/* Replace a file by a new one that is complete and on the disk, or leave the old one.
 * dray__begin_file opens a file beside it, or returns NULL with errno. dray__end_file puts that in
 * place if `written` is true (all of it was written). Returns 0, or DRAY_ESYS. */
FILE *dray__begin_file(const char *path);
int dray__end_file(FILE *file, bool written, const char *path, dray_error *error);
/* Removes a folder and everything in it. Succeeds when the folder does not exist. */
int dray__remove_tree(const char *path, dray_error *error);
/* Finds the folder for files that can be made or fetched again: $DRAY_CACHE, else dray in
 * $XDG_CACHE_HOME or in ~/.cache. It is made if it does not exist. Returns false when none can be
 * found or made. */
bool dray__cache_folder(char *out, size_t size);
/* Syncs the folder's entries to the disk. */
int dray__sync_folder(const char *path, dray_error *error);
