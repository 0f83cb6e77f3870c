/* Reading and writing ranges of files in the background, several at once, past the page cache where
 * the file system allows it: by io_uring where the kernel does, else by a few threads.
 *
 * A range is one dray__io of the caller's, submitted, and taken back when it is done. Ranges whose
 * place in the file, size and address are multiples of DRAY__IO_ALIGN are read directly. All
 * others, and all on file systems without direct I/O (tmpfs, some overlays), go through the page
 * cache. */
#pragma once

#include <dray/memory.h>
#include <stdbool.h>

enum { DRAY__IO_ALIGN = 4096, DRAY__IO_DEPTH = 64 };

typedef struct dray__disk dray__disk;

/* A file to read or write. The region's descriptor is borrowed. */
typedef struct dray__disk_file {
    int fd;
    int direct; /* the same file past the page cache; -1: not possible. Only the disk's threads ask
                 */
    const char *name;
    const dray_region *object; /* not a file of this machine, but read through its store; NULL when
                                * fd is the file */
} dray__disk_file;

/* name is borrowed. Never fails: where direct I/O is not possible, there is none. */
void dray__disk_file_open(dray__disk_file *file, int fd, bool writable, const char *name);
/* Of a region of another store. Such files are for disks with threads (DRAY__DISK_THREADS). */
void dray__disk_file_object(dray__disk_file *file, const dray_region *region);
void dray__disk_file_close(dray__disk_file *file);

typedef struct dray__io {
    dray__disk_file *file;
    bool write;
    void *data;
    uint64_t offset;
    size_t bytes;
    size_t least; /* of a read: so many must be there, more may be missing at the file's end */
    void *user;
    /* the disk's */
    size_t done;
    bool direct;
    int code;        /* errno; 0 when done */
    int object_code; /* of an object: the error, and its message */
    dray_error *why; /* the caller's room for them; NULL when there is none */
    struct dray__io *next;
} dray__io;

typedef enum dray__disk_way {
    DRAY__DISK_ANY = 0, /* io_uring where the kernel has it */
    DRAY__DISK_THREADS,
    DRAY__DISK_URING /* DRAY_EUNSUPPORTED where the kernel or this container has none */
} dray__disk_way;

int dray__disk_open(dray__disk_way way, dray__disk **out, dray_error *error);
/* Never waits; any number may be under way. */
void dray__disk_submit(dray__disk *disk, dray__io *io);
/* Takes one that is done, in any order; NULL when none is. */
dray__io *dray__disk_take(dray__disk *disk);
size_t dray__disk_under_way(const dray__disk *disk); /* submitted and not taken */
/* Readable when dray__disk_take is worth a try. */
int dray__disk_fd(const dray__disk *disk);
/* The result of an io: DRAY_OK, DRAY_ESYS, or DRAY_EFORMAT when the file ends before `least`, with
 * the file's name. */
int dray__io_result(const dray__io *io, dray_error *error);
/* Waits for all that is under way. NULL is fine. */
void dray__disk_close(dray__disk *disk);

/* Called before each piece of work, from any thread. Returns an errno with which it is to fail, -1
 * when half of it is to be done, or 0. For tests; set before threads start. */
typedef int (*dray__disk_fault_fn)(void *user, const dray__io *io);
void dray__disk_faults(dray__disk_fault_fn fn, void *user);
/* The meaning of DRAY__DISK_ANY from now on; for tests and benchmarks. */
void dray__disk_prefer(dray__disk_way way);
