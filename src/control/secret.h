/* What a TCP connection shows to prove that it is of the user who serves: a random number that lies
 * in a file which only that user can read. (A Unix socket's mode and SO_PEERCRED say the same.) */
#ifndef DRAY_CONTROL_SECRET_H
#define DRAY_CONTROL_SECRET_H

#include "control/address.h"

#include <stdint.h>
#include <sys/stat.h>

typedef struct dray__secret {
    uint8_t bytes[32];
} dray__secret;

/* Where the file of the server at this TCP address lies: $DRAY_TOKEN_FILE, else
 * dray-tcp-PORT.token in $XDG_RUNTIME_DIR, or /tmp/dray-UID-tcp-PORT.token. Returns out. */
char *dray__secret_path(const dray__address *address, char *out, size_t capacity);
/* Draws one and writes the file anew, mode 0600. *st is the file's. DRAY_ESYS. */
int dray__secret_make(const char *path, dray__secret *out, struct stat *st, dray_error *error);
/* DRAY_ENOENT; DRAY_EPERM: somebody else's, or readable by others; DRAY_EFORMAT; DRAY_ESYS. */
int dray__secret_read(const char *path, dray__secret *out, dray_error *error);
/* Takes the same time for every wrong one. */
bool dray__same_bytes(const void *a, const void *b, size_t size);

#endif
