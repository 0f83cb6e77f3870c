/* Tokens, by which connections over TCP prove their rights. A coordinator has a master token.
 * Tokens of roles are derived from it (HMAC-SHA256), so the coordinator keeps no list, and the
 * holder of an engine's token cannot make a trainer's.
 *
 * As text, in a file of mode 0600 or $DRAY_TOKEN:  dray1.SESSION.ROLE.KEY
 *
 * SESSION is 16 hexadecimal digits that name the coordinator's session; KEY is 64. The part before
 * the key is the identity that TLS sends; the key is the secret that both sides must know
 * (base/tls.h).
 *
 * (Over a Unix socket, its mode and SO_PEERCRED prove the user, and the user may do everything.) */
#pragma once

#include "base/tls.h"
#include "control/protocol.h"
#include "net/address.h"

/* Returns the rights of "trainer", "engine", "task", "tool" or "master", as bits; 0 for a role
 * without tokens. */
uint32_t dray__role_bits(const char *role);

typedef dray__tls_key dray__token;

/* Returns the role in an identity, borrowed from it; "" when it has none. */
const char *dray__token_role_of(const char *identity);

/* Draws a new master token. Returns 0, or DRAY_ESYS. */
int dray__token_draw(dray__token *out, dray_error *error);
/* Draws a new key that members show each other, at each start of a coordinator. Returns 0, or
 * DRAY_ESYS. */
int dray__token_data(dray__token *out, dray_error *error);
/* Reads the file by which a coordinator knows the members of earlier ones: a secret, and how many
 * coordinators have started with it, this one included. Makes the file if it does not exist. */
int dray__token_state(const char *path, dray__token *out, uint64_t *generation, dray_error *error);
/* Derives the key that members show each other, the same for all coordinators of this state.
 * Returns false when out of memory. */
bool dray__token_data_of(const dray__token *state, dray__token *out);
/* Makes a role's token. Returns 0, DRAY_EINVALID when it is not a role, or `master` is not a
 * master's token, or DRAY_ENOMEM. */
int dray__token_derive(const dray__token *master, const char *role, dray__token *out,
                       dray_error *error);
/* Fills in the key that a client with key->identity must know: the master's, or one that is derived
 * from it. Returns false when the identity is of another session, or of no role. */
bool dray__token_answer(const dray__token *master, dray__tls_key *key);
/* Parses a token. `where` is for messages. Returns 0, or DRAY_EFORMAT. */
int dray__token_parse(const char *text, const char *where, dray__token *out, dray_error *error);
enum { DRAY__TOKEN_TEXT = DRAY__TLS_IDENTITY + 2 * DRAY__TLS_KEY + 2 };
char *dray__token_print(const dray__token *token, char out[DRAY__TOKEN_TEXT]); /* returns out */

/* Reads a token's file. Returns 0, DRAY_ENOENT, DRAY_EPERM when the file is another user's, or
 * readable by others, DRAY_EFORMAT, or DRAY_ESYS. */
int dray__token_read(const char *path, dray__token *out, dray_error *error);
/* Writes the file, mode 0600, whole or not at all. Returns 0, DRAY_EEXIST, or DRAY_ESYS. */
int dray__token_write(const char *path, const dray__token *token, dray_error *error);
/* Replaces the file's content with the token in $DRAY_TOKEN, if it is set. This is for schedulers
 * that pass secrets in the environment to programs that want files. */
int dray__token_keep(const char *path, dray_error *error);
/* For a server: reads the file, or makes it if it does not exist. Returns 0, or DRAY_EINVALID when
 * it holds the token of a role. */
int dray__token_master(const char *path, dray__token *out, dray_error *error);

/* Writes the default path of a server's token: dray-tcp-PORT.token in $XDG_RUNTIME_DIR, where no
 * other user can write. Returns false when there is no such folder. */
bool dray__token_path(const dray__address *address, char *out, size_t capacity);
/* Finds a client's token: $DRAY_TOKEN, else the file $DRAY_TOKEN_FILE, else the file at
 * dray__token_path. */
int dray__token_find(const dray__address *address, dray__token *out, dray_error *error);
