/* The files of journals: a head, then records; read here, and written through an output.
 *
 * The head: u32 magic "DRJF", u32 format, u64 salt, u64 0, u64 XXH3 of these. The salt is random,
 * and another one whenever the file is written anew: it seeds the sums of records. So a file may
 * hold anything behind its last record: what was in it before is none of its records any more, nor
 * is anything that a producer wrote into a sample.
 *
 * A record: u32 magic "DRJR", u16 kind, u16 format, u64 bytes of the body, u64 sequence number,
 * u64 number of the last record that was safe when it was written, u32 owner, u32 flags (1: its
 * pieces were gone, and hold nothing), u64 XXH3 of the body and then all this (with itself 0); the
 * body; zeros up to a multiple of 8. The sum comes last, and so does the header get written last:
 * the bytes of a record go to the disk while the next ones are fetched and summed. */
#pragma once

#include "queue/journal/journal.h"

enum {
    DRAY__FILE_HEAD = 32,
    DRAY__RECORD_HEAD = 48,
    DRAY__RECORD_MISSING = 1 /* a flag */
};

typedef struct dray__record { /* its header */
    uint32_t magic;
    uint16_t kind, format;
    uint64_t size, seq, safe;
    uint32_t owner, flags;
    uint64_t sum;
} dray__record;

typedef struct dray__file_head {
    uint32_t magic, format;
    uint64_t salt, zero, sum;
} dray__file_head;

extern const dray__fields dray__record_fields, dray__file_head_fields;

/* In the file, with its header. */
uint64_t dray__record_bytes(const dray__record *record);
/* Reads the header at `at`. Returns 0, or DRAY_EFORMAT when there is no header that fits before
 * `end`. */
int dray__record_at(int fd, const char *path, uint64_t at, uint64_t end, dray__record *out,
                    dray_error *error);
/* Calls `each` for the records of [from, file). *end: where the last whole one ends. */
int dray__records_read(int fd, const char *path, uint64_t salt, uint64_t file,
                       dray__journal_each each, void *user, uint64_t *end, uint64_t *last,
                       dray_error *error);

/* *salt is 0 where the file holds nothing, not even a head. */
int dray__head_read(int fd, const char *path, uint64_t *salt, dray_error *error);
/* Not synced. A salt that is new. */
int dray__head_write(const dray__journal_files *files, int fd, const char *path, uint64_t *salt,
                     dray_error *error);

extern const dray__journal_files dray__journal_real_files;
/* DRAY_EFULL where the disk is. */
int dray__file_failed(const char *path, int errnum, const char *what, dray_error *error);

/* Output to a file, through a block of memory that stays in the processor's cache. */
typedef struct dray__output {
    const dray__journal_files *files;
    const char *path; /* borrowed */
    int fd;
    uint64_t salt;
    uint64_t at;      /* of the block in the file */
    uint64_t started; /* the disk was told to write up to there */
    uint8_t *block;
    size_t used, summed;
    bool in_record;
    struct dray__sum *sum;
} dray__output;

int dray__output_init(dray__output *out, const dray__journal_files *files, dray_error *error);
void dray__output_free(dray__output *out);
/* From now on it writes there. */
void dray__output_to(dray__output *out, int fd, const char *path, uint64_t salt, uint64_t at);
/* Where the next byte goes. */
uint64_t dray__output_end(const dray__output *out);
/* Sets entry->missing when its pieces were gone. */
int dray__output_entry(dray__output *out, dray__journal_entry *entry, uint64_t safe,
                       const dray__journal_options *from, dray_error *error);
/* Copies a record of another file, and checks its sum. */
int dray__output_copy(dray__output *out, int from, const char *path, uint64_t salt, uint64_t at,
                      const dray__record *record, dray_error *error);
int dray__output_flush(dray__output *out, dray_error *error);
