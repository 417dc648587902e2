// Both ends of benchmarks.gateway: an engine that answers at once, and a client that keeps a gateway busy. One thread each.
//
//   http_ends engine                        prints its port, serves until its standard input closes
//   http_ends load PORT CONNECTIONS REQUESTS < BODIES    prints one line of JSON; bodies are little-endian uint32 lengths, each
//                                           followed by so many bytes, taken in turns by whichever connection is free
//
// The engine reads of a body what it must: max_tokens, whether it streams, whether it is a prefill leg, and "seed", which is
// the pause between two tokens in ms (0: none). A stream is one write per token, its tokens in turns with those of others, as a
// batch decodes; each names its token where that is asked for ("resumable"). Bodies come with a Content-Length; answers may have one or be chunked.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MAX_CONNECTIONS 1024
#define PATH "/v1/chat/completions"
#define TOKEN(ids) "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"mock\"," \
  "\"choices\":[{\"index\":0,\"delta\":{\"content\":\" token\"},\"finish_reason\":null" ids "}]}\n\n"
#define NAMED TOKEN(",\"token_ids\":[6634]")
#define WHOLE "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"mock\",\"choices\":[{\"index\":0," \
  "\"message\":{\"role\":\"assistant\",\"content\":\" token\"},\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":7," \
  "\"completion_tokens\":1,\"total_tokens\":8}%s}"
#define DELIVERED ",\"kv_transfer_params\":{\"delivered\":true,\"num_tokens\":7,\"bytes_total\":1000," \
  "\"bytes_before_prefill_end\":900,\"prefill_end_s\":0.001,\"delivered_s\":0.002,\"link\":\"tcp\"}"

typedef struct {
  int fd;
  char *in; size_t used, room;       // what has come and is not dealt with yet
  const char *out; size_t left;      // load: what is still to be sent
  char *owned;                       // load: where `out` began
  int tokens, named; double due, pause_s;  // engine: of the stream under way
  double asked, first; int status, chunked; long long body; // load: of the answer under way
} Conn;

static Conn conns[MAX_CONNECTIONS];
static int poller;

static void die(const char *what) { perror(what); exit(1); }

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

static void watch(int op, Conn *c, uint32_t events) {
  struct epoll_event e = {.events = events, .data.ptr = c};
  if (epoll_ctl(poller, op, c->fd, &e)) die("epoll_ctl");
}

static Conn *adopt(int fd) {
  for (int i = 0; i < MAX_CONNECTIONS; i++)
    if (conns[i].fd == -1) {
      int on = 1;
      setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      fcntl(fd, F_SETFL, O_NONBLOCK);
      char *in = conns[i].in;
      size_t room = conns[i].room;
      conns[i] = (Conn){.fd = fd, .in = in, .room = room};
      watch(EPOLL_CTL_ADD, &conns[i], EPOLLIN);
      return &conns[i];
    }
  die("too many connections");
  return NULL;
}

static void drop(Conn *c) { close(c->fd); c->fd = -1; c->used = 0; c->tokens = 0; }

// Reads all there is; 0 when the other end has closed.
static int fill(Conn *c) {
  for (;;) {
    if (c->room - c->used < 65536 && !(c->in = realloc(c->in, c->room = 2 * c->room + 131072))) die("realloc");
    ssize_t n = read(c->fd, c->in + c->used, c->room - c->used - 1);
    if (n == 0 || (n < 0 && errno != EAGAIN)) return 0;
    if (n < 0) { c->in[c->used] = 0; return 1; }
    c->used += n;
  }
}

static void consume(Conn *c, size_t n) { memmove(c->in, c->in + n, c->used -= n); c->in[c->used] = 0; }

static void send_all(Conn *c, const char *data, size_t size) {
  while (size) {
    ssize_t n = write(c->fd, data, size);
    if (n < 0 && errno != EAGAIN) return;  // the reader has left; its connection ends when it is read
    if (n > 0) data += n, size -= n;
  }
}

static const char *header(const char *head, const char *end, const char *name) {
  for (const char *p = head; (p = strcasestr(p, name)) && p < end; p++)
    if (p[-1] == '\n') return p + strlen(name);
  return NULL;
}

static long number(const char *body, size_t size, const char *name, long otherwise) {
  const char *p = memmem(body, size, name, strlen(name));
  return p ? strtol(p + strlen(name), NULL, 10) : otherwise;
}

// Engine

static void answer(Conn *c, const char *body, size_t size) {
  char text[2048], all[4096];
  if (memmem(body, size, "\"stream\":true", 13)) {
    c->tokens = number(body, size, "\"max_tokens\":", 1) + 1;  // one more: the end
    c->named = memmem(body, size, "\"resumable\":true", 16) != NULL;
    c->pause_s = number(body, size, "\"seed\":", 0) * 1e-3;
    c->due = now_s();
    const char *head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n";
    send_all(c, head, strlen(head));
    return;
  }
  int is_prefill = memmem(body, size, "\"do_remote_decode\":true", 23) != NULL;
  int n = snprintf(text, sizeof text, WHOLE, is_prefill ? DELIVERED : "");
  n = snprintf(all, sizeof all, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", n, text);
  send_all(c, all, n);
}

static void serve(Conn *c) {
  char *end;
  while (!c->tokens && c->used && (end = memmem(c->in, c->used, "\r\n\r\n", 4))) {
    const char *length = header(c->in, end, "content-length:");
    size_t start = end + 4 - c->in, size = length ? strtoul(length, NULL, 10) : 0;
    if (c->used < start + size) return;
    answer(c, c->in + start, size);
    consume(c, start + size);
  }
}

// One token of every stream that is due; how long nothing will be, in ms.
static int stream_tokens(void) {
  static char event[2][512];
  static int size[2];
  if (!size[0]) {
    size[0] = snprintf(event[0], sizeof event[0], "%zx\r\n%s\r\n", sizeof TOKEN("") - 1, TOKEN(""));
    size[1] = snprintf(event[1], sizeof event[1], "%zx\r\n%s\r\n", sizeof NAMED - 1, NAMED);
  }
  double now = now_s(), next = now + 1;
  for (int i = 0; i < MAX_CONNECTIONS; i++) {
    Conn *c = &conns[i];
    if (c->fd == -1 || !c->tokens) continue;
    if (c->due <= now) {
      if (--c->tokens) send_all(c, event[c->named], size[c->named]);
      else send_all(c, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n", 24);
      c->due += c->pause_s;
      if (!c->tokens) { serve(c); continue; }
    }
    if (c->due < next) next = c->due;
  }
  return next <= now ? 0 : (int)((next - now) * 1e3) + 1;
}

static void engine(void) {
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t size = sizeof at;
  int listener = socket(AF_INET, SOCK_STREAM, 0);
  if (bind(listener, (void *)&at, size) || listen(listener, 512) || getsockname(listener, (void *)&at, &size)) die("listen");
  Conn door = {.fd = listener}, owner = {.fd = 0};
  watch(EPOLL_CTL_ADD, &door, EPOLLIN);
  watch(EPOLL_CTL_ADD, &owner, EPOLLIN);
  printf("{\"port\": %d}\n", ntohs(at.sin_port));
  fflush(stdout);
  for (;;) {
    struct epoll_event events[64];
    int n = epoll_wait(poller, events, 64, stream_tokens());
    for (int i = 0; i < n; i++) {
      Conn *c = events[i].data.ptr;
      if (c == &owner) return;
      if (c == &door) adopt(accept(listener, NULL, NULL));
      else if (!fill(c)) drop(c);
      else serve(c);
    }
  }
}

// Load

typedef struct { char *data; size_t size; } Body;
static Body *bodies;
static size_t num_bodies, taken, wanted, done, failed;
static double *whole_s, *first_s;

static void read_bodies(void) {
  uint32_t size;
  while (fread(&size, 4, 1, stdin) == 1) {
    bodies = realloc(bodies, (num_bodies + 1) * sizeof *bodies);
    char *data = malloc(size + 256);
    int head = sprintf(data, "POST " PATH " HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %u\r\n\r\n", size);
    if (fread(data + head, 1, size, stdin) != size) die("bodies");
    bodies[num_bodies++] = (Body){data, head + size};
  }
}

static void push(Conn *c) {
  while (c->left) {
    ssize_t n = write(c->fd, c->out, c->left);
    if (n < 0) {
      if (errno != EAGAIN) die("write");
      break;
    }
    c->out += n, c->left -= n;
  }
  watch(EPOLL_CTL_MOD, c, c->left ? EPOLLIN | EPOLLOUT : EPOLLIN);
}

static void ask(Conn *c) {
  if (taken == wanted) return;
  Body *body = &bodies[taken++ % num_bodies];
  c->out = body->data, c->left = body->size;
  c->asked = now_s(), c->first = 0, c->status = 0;
  push(c);
}

// Whether the answer is whole; what has been dealt with is consumed.
static int take(Conn *c) {
  if (!c->status) {
    char *end = memmem(c->in, c->used, "\r\n\r\n", 4);
    if (!end) return 0;
    const char *length = header(c->in, end, "content-length:"), *coding = header(c->in, end, "transfer-encoding:");
    c->status = atoi(c->in + 9);
    c->chunked = coding != NULL;
    c->body = length ? atoll(length) : 0;
    consume(c, end + 4 - c->in);
  }
  if (c->used && !c->first) c->first = now_s();
  if (!c->chunked) {
    if ((long long)c->used < c->body) return 0;
    consume(c, c->body);
    return 1;
  }
  size_t at = 0;
  for (;;) {
    char *line = memmem(c->in + at, c->used - at, "\r\n", 2);
    if (!line) break;
    size_t size = strtoul(c->in + at, NULL, 16), next = line + 2 - c->in + size + 2;
    if (next > c->used) break;
    at = next;
    if (!size) { consume(c, at); return 1; }
  }
  consume(c, at);
  return 0;
}

static int by_size(const void *a, const void *b) { return *(double *)a < *(double *)b ? -1 : 1; }

static double share(double *of, double which) {
  qsort(of, done, sizeof *of, by_size);
  return of[(size_t)(which * (done - 1))] * 1e3;
}

static void load(int port, int connections) {
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons(port)};
  read_bodies();
  whole_s = calloc(wanted, sizeof *whole_s), first_s = calloc(wanted, sizeof *first_s);
  double began = now_s();
  for (int i = 0; i < connections; i++) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(fd, (void *)&at, sizeof at)) die("connect");
    ask(adopt(fd));
  }
  while (done < wanted) {
    struct epoll_event events[64];
    int n = epoll_wait(poller, events, 64, 60000);
    if (n == 0) die("no answer within a minute");
    for (int i = 0; i < n; i++) {
      Conn *c = events[i].data.ptr;
      if (c->left && events[i].events & EPOLLOUT) push(c);
      if (!(events[i].events & EPOLLIN)) continue;
      int open = fill(c);
      if (take(c)) {
        failed += c->status != 200;
        first_s[done] = c->first - c->asked, whole_s[done++] = now_s() - c->asked;
        if (open) ask(c);
      } else if (!open) { fprintf(stderr, "the gateway closed a connection\n"); exit(1); }
    }
  }
  printf("{\"requests\": %zu, \"failed\": %zu, \"seconds\": %.6f, \"p50_ms\": %.4f, \"p99_ms\": %.4f, \"first_p50_ms\": %.4f}\n",
         done, failed, now_s() - began, share(whole_s, 0.5), share(whole_s, 0.99), share(first_s, 0.5));
}

int main(int argc, char **argv) {
  poller = epoll_create1(0);
  for (int i = 0; i < MAX_CONNECTIONS; i++) conns[i].fd = -1;
  if (argc == 2 && !strcmp(argv[1], "engine")) engine();
  else if (argc == 5 && !strcmp(argv[1], "load")) wanted = atoll(argv[4]), load(atoi(argv[2]), atoi(argv[3]));
  else return 2;
  return 0;
}
