/* Whole reads and writes: what a signal or the file system cut short goes on. Names in a folder. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/types.h>

/* 0, or -1 with errno; EIO: the file ends before. */
int dray__read_at(int fd, void *data, size_t size, off_t at);
int dray__write_all(int fd, const void *data, size_t size);
/* The rest of one file, to the other. 0, or -1 with errno. */
int dray__copy_rest(int from, int to);
/* As open(2), close-on-exec, of what is in the folder or beneath it: ".." and absolute paths lead
 * nowhere, nor do links. Where the kernel has no openat2 (before 5.6), names alone, no paths. -1
 * with errno. */
int dray__open_beneath(int folder, const char *name, int flags, mode_t mode);
/* fopen of "r", "w" or "a", close-on-exec, and not where the path ends in a symbolic link (ELOOP):
 * what others put into our folders leads nowhere else. */
FILE *dray__open_stream(const char *path, const char *mode);
/* What is left in a stream, which is closed; path: its name. NULL: errno says why it was not opened
 * (DRAY_ENOENT, DRAY_ESYS). *out: malloc'ed, with a zero behind it. DRAY_EFORMAT: more than `most`
 * bytes. */
int dray__read_stream(FILE *file, const char *path, size_t most, char **out, size_t *size,
                      dray_error *error);
/* Puts a file in place of what is there: whole and on the disk, or not at all. begin opens one
 * beside it (NULL: errno), end takes its place; written: it was. DRAY_ESYS. */
FILE *dray__begin_file(const char *path);
int dray__end_file(FILE *file, bool written, const char *path, dray_error *error);
/* Removes a folder and all that is in it; that it is not there is fine. */
int dray__remove_tree(const char *path, dray_error *error);
/* Returns when what the folder lists is on the disk. */
int dray__sync_folder(const char *path, dray_error *error);
