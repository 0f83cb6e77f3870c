/* A coordinator and a keeper in a thread, and between them and their clients a proxy that hands on
 * frames, one by one, to who wants to see or change them. And scenes: what trainers, engines and
 * tasks say to each of them, so that targets begin with real messages. */
#pragma once

#include "control/frame.h"
#include "fuzz/fuzz.h"

#include <pthread.h>

enum { SCENE_COORDINATOR, SCENE_KEEPER, SCENE_SERVERS };

/* One connection through the proxy, from its beginning to its end. */
typedef struct scene_link {
    struct scene_link *next;
    int server;      /* SCENE_... */
    uint32_t number; /* of its server's, from 0 */
    int fds[2];      /* the client's, the server's */
    dray__inbox from[2];
    void *user; /* the watcher's */
} scene_link;

/* Called in the proxy's thread, for each frame. answer: of the server. The watcher hands it on
 * (scene_send), or not. */
typedef void (*scene_watch)(void *user, scene_link *link, bool answer, const dray__frame *frame,
                            const int *fds);
void scene_send(scene_link *link, bool answer, const dray__frame *frame, const int *fds);
void scene_send_bytes(scene_link *link, bool answer, const void *data, size_t size);

/* An answer's payload, with the path of this keeper where it says one. */
void scene_put_answer(dray__writer *w, const dray__frame *frame, const char *keeper);

typedef struct scene scene;

/* `folder` of durable queues: NULL: none. */
scene *scene_start(const char *journals, scene_watch watch, void *user);
/* Through the proxy alone, to servers that are elsewhere. */
scene *scene_start_at(const char *const paths[SCENE_SERVERS], scene_watch watch, void *user);
const char *scene_address(const scene *s); /* of the coordinator, for clients */
const char *scene_path(const scene *s, int server);
void scene_stop(scene *s); /* when all clients are closed */

/* The path of a keeper for the whole life of the process. */
const char *scene_keeper(void);

/* How long they wait for each other where they are disturbed. */
extern int64_t scene_patience_ns;

/* What clients do; each opens and closes its own. `name` is that of the queue, or the model; step:
 * 0 the whole story of a queue, else one partition of many. false: it was refused somewhere, where
 * somebody disturbs. Without that `strict` ends the process. */
bool scene_queue(const char *address, const char *name, int durability, uint32_t step, bool strict);
bool scene_weights(const char *address, const char *name, bool strict);
bool scene_by_hand(const char *address, const char *name, bool strict);
bool scene_leases(const char *address, const char *name, bool strict);
