/* Whole reads and writes: what a signal or the file system cut short goes on. */
#ifndef DRAY_BASE_IO_H
#define DRAY_BASE_IO_H

#include <stddef.h>
#include <sys/types.h>

/* 0, or -1 with errno; EIO: the file ends before. */
int dray__read_at(int fd, void *data, size_t size, off_t at);
int dray__write_all(int fd, const void *data, size_t size);

#endif
