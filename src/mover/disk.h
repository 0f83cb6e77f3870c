/* Reads and writes ranges of files in the background, several at once, with direct I/O where the
 * file system allows it. It uses io_uring where the kernel has it, else a few threads.
 *
 * The caller owns one dray__io for each range, submits it, and takes it back when it is done.
 * Direct I/O is used for ranges whose file offset, size and address are multiples of
 * DRAY__IO_ALIGN. All others, and all on file systems without direct I/O (tmpfs, some overlays),
 * go through the page cache. */
#pragma once

#include <dray/memory.h>
#include <stdbool.h>

enum { DRAY__IO_ALIGN = 4096, DRAY__IO_DEPTH = 64 };

typedef struct dray__disk dray__disk;

/* A file to read or write. The region's descriptor is borrowed. */
typedef struct dray__disk_file {
    int fd;
    int direct; /* the same file opened for direct I/O; -1 when that is not possible */
    const char *name;
    const dray_region *object; /* set for a file in a store, which is read through the store; NULL
                                * for a local file, which is fd */
} dray__disk_file;

/* name is borrowed. Never fails: without direct I/O, `direct` is -1. */
void dray__disk_file_open(dray__disk_file *file, int fd, bool writable, const char *name);
/* For a region in a store. Only disks with threads (DRAY__DISK_THREADS) can read such files. */
void dray__disk_file_object(dray__disk_file *file, const dray_region *region);
void dray__disk_file_close(dray__disk_file *file);

typedef struct dray__io {
    dray__disk_file *file;
    bool write;
    void *data;
    uint64_t offset;
    size_t bytes;
    size_t least; /* of a read: the file must have at least so many; it may end before `bytes` */
    void *user;
    /* set by the disk */
    size_t done;
    bool direct;
    int code;        /* errno; 0 when done */
    int object_code; /* the result of reading an object: a DRAY_E code */
    dray_error *why; /* the caller's buffer for that error's message, or NULL */
    struct dray__io *next;
} dray__io;

typedef enum dray__disk_way {
    DRAY__DISK_ANY = 0, /* io_uring where the kernel has it */
    DRAY__DISK_THREADS,
    DRAY__DISK_URING /* DRAY_EUNSUPPORTED where the kernel or this container has none */
} dray__disk_way;

int dray__disk_open(dray__disk_way way, dray__disk **out, dray_error *error);
/* Never blocks; any number may be under way. */
void dray__disk_submit(dray__disk *disk, dray__io *io);
/* Returns one that is done, in any order, or NULL when none is. */
dray__io *dray__disk_take(dray__disk *disk);
size_t dray__disk_under_way(const dray__disk *disk); /* submitted and not taken */
/* Readable when dray__disk_take is worth a try. */
int dray__disk_fd(const dray__disk *disk);
/* The result of an io: DRAY_OK, DRAY_ESYS, or DRAY_EFORMAT when the file ends before `least`, with
 * the file's name. */
int dray__io_result(const dray__io *io, dray_error *error);
/* Waits for all that is under way, but not in a forked child, which frees its copy alone. NULL is
 * fine. */
void dray__disk_close(dray__disk *disk);

/* Called before each read or write, from any thread. Returns an errno with which it fails, -1 to do
 * only half of it, or 0. For tests; set before threads start. */
typedef int (*dray__disk_fault_fn)(void *user, const dray__io *io);
void dray__disk_faults(dray__disk_fault_fn fn, void *user);
/* Sets the meaning of DRAY__DISK_ANY from now on; for tests and benchmarks. */
void dray__disk_prefer(dray__disk_way way);
