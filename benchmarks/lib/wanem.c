/* A wide-area link between two network namespaces: rate, delay, loss and a tail-drop queue, in user space.
 *
 *   wanem NS_A NS_B RATE_MBIT ONE_WAY_MS LOSS QUEUE_BYTES MTU SEED
 *
 * Each namespace gets a TUN device "wan0" (10.88.0.1 and 10.88.0.2; the caller sets addresses). A packet read from one side is
 * lost with probability LOSS, dropped when the queue before the bottleneck is full, else leaves the bottleneck when the packets
 * before it have, and is written to the other side ONE_WAY_MS later.
 *
 * On stdin: "rate MBIT" changes the rate of both directions, for what is queued, too; "stats" prints one JSON line; end of file ends the program.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define SLOTS (1u << 17)
#define BATCH 64

struct packet {
    uint64_t due_ns;
    uint32_t length;
};

struct direction {
    int from, to;
    struct packet *ring;
    unsigned char *bytes; /* SLOTS of `stride` bytes, touched only when used */
    uint32_t head, tail;  /* head: next to deliver; tail: next free */
    uint64_t free_ns;     /* when the bottleneck has sent all it was given */
    uint64_t packets, octets, lost, dropped, max_queue;
};

static double bytes_per_ns, loss;
static uint64_t delay_ns, queue_limit, rng_state;
static size_t stride, mtu;

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static double uniform(void) { /* xorshift64* */
    rng_state ^= rng_state >> 12;
    rng_state ^= rng_state << 25;
    rng_state ^= rng_state >> 27;
    return (double)((rng_state * 2685821657736338717u) >> 11) / 9007199254740992.0;
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

static int tun_in(const char *ns) {
    char path[256];
    snprintf(path, sizeof path, "/run/netns/%s", ns);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || setns(fd, CLONE_NEWNET) < 0) die(path);
    close(fd);
    int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
    strcpy(request.ifr_name, "wan0");
    if (tun < 0 || ioctl(tun, TUNSETIFF, &request) < 0) die("tun");
    return tun;
}

static void take(struct direction *d) {
    for (int i = 0; i < BATCH && d->tail - d->head < SLOTS; i++) {
        unsigned char *slot = d->bytes + (size_t)(d->tail % SLOTS) * stride;
        ssize_t length = read(d->from, slot, stride);
        if (length <= 0) return;
        uint64_t now = now_ns();
        d->packets++;
        d->octets += (uint64_t)length;
        if (loss > 0 && uniform() < loss) {
            d->lost++;
            continue;
        }
        uint64_t start = d->free_ns > now ? d->free_ns : now;
        uint64_t queued = (uint64_t)((double)(start - now) * bytes_per_ns);
        if (queued + (uint64_t)length > queue_limit) {
            d->dropped++;
            continue;
        }
        if (queued > d->max_queue) d->max_queue = queued;
        d->free_ns = start + (uint64_t)((double)length / bytes_per_ns);
        d->ring[d->tail % SLOTS] = (struct packet){d->free_ns + delay_ns, (uint32_t)length};
        d->tail++;
    }
}

static void deliver(struct direction *d) {
    while (d->head != d->tail && d->ring[d->head % SLOTS].due_ns <= now_ns()) {
        uint32_t slot = d->head++ % SLOTS;
        if (write(d->to, d->bytes + (size_t)slot * stride, d->ring[slot].length) < 0 && errno != EAGAIN && errno != EIO)
            die("write");
    }
}

static void report(const struct direction *d, const char *name, const char *end) {
    uint64_t now = now_ns(), queued = d->free_ns > now ? (uint64_t)((double)(d->free_ns - now) * bytes_per_ns) : 0;
    printf("\"%s\": {\"packets\": %lu, \"bytes\": %lu, \"lost\": %lu, \"dropped\": %lu, \"max_queue_bytes\": %lu, "
           "\"queue_bytes\": %lu}%s",
           name, d->packets, d->octets, d->lost, d->dropped, d->max_queue, queued, end);
}

static uint64_t stretched(uint64_t then, uint64_t now, double factor) {
    return then > now ? now + (uint64_t)((double)(then - now) * factor) : then;
}

static void set_rate(struct direction *d, double rate) { /* what is queued leaves at the new rate, too */
    uint64_t now = now_ns();
    double factor = bytes_per_ns / rate;
    d->free_ns = stretched(d->free_ns, now, factor);
    for (uint32_t i = d->head; i != d->tail; i++) {
        struct packet *p = &d->ring[i % SLOTS];
        p->due_ns = stretched(p->due_ns - delay_ns, now, factor) + delay_ns;
    }
}

static int command(struct direction d[2]) { /* 0 at the end of stdin */
    char line[128];
    ssize_t n = read(0, line, sizeof line - 1);
    if (n <= 0) return 0;
    line[n] = 0;
    double mbit;
    if (sscanf(line, "rate %lf", &mbit) == 1 && mbit > 0) {
        for (int i = 0; i < 2; i++) set_rate(&d[i], mbit / 8000.0);
        bytes_per_ns = mbit / 8000.0;
    }
    if (!strncmp(line, "stats", 5)) {
        printf("{");
        report(&d[0], "a_to_b", ", ");
        report(&d[1], "b_to_a", "}\n");
        for (int i = 0; i < 2; i++) d[i].packets = d[i].octets = d[i].lost = d[i].dropped = d[i].max_queue = 0;
    } else {
        printf("ok\n");
    }
    fflush(stdout);
    return 1;
}

static int64_t until_next(const struct direction d[2], uint64_t now) {
    int64_t wait = 1000000000;
    for (int i = 0; i < 2; i++)
        if (d[i].head != d[i].tail) {
            int64_t left = (int64_t)(d[i].ring[d[i].head % SLOTS].due_ns - now);
            if (left < wait) wait = left;
        }
    return wait < 0 ? 0 : wait;
}

int main(int argc, char **argv) {
    if (argc != 9) {
        fprintf(stderr, "usage: wanem NS_A NS_B RATE_MBIT ONE_WAY_MS LOSS QUEUE_BYTES MTU SEED\n");
        return 2;
    }
    bytes_per_ns = atof(argv[3]) / 8000.0;
    delay_ns = (uint64_t)(atof(argv[4]) * 1e6);
    loss = atof(argv[5]);
    queue_limit = strtoull(argv[6], NULL, 10);
    mtu = strtoull(argv[7], NULL, 10);
    rng_state = strtoull(argv[8], NULL, 10) * 2654435769u + 88172645463325252u;
    stride = (mtu + 63) / 64 * 64;
    struct direction d[2] = {0};
    int a = tun_in(argv[1]), b = tun_in(argv[2]);
    for (int i = 0; i < 2; i++) {
        d[i].from = i ? b : a;
        d[i].to = i ? a : b;
        d[i].ring = calloc(SLOTS, sizeof *d[i].ring);
        d[i].bytes = mmap(NULL, SLOTS * stride, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (!d[i].ring || d[i].bytes == MAP_FAILED) die("memory");
    }
    printf("ready\n");
    fflush(stdout);
    for (;;) {
        struct pollfd fds[3] = {{a, POLLIN, 0}, {b, POLLIN, 0}, {0, POLLIN, 0}};
        int64_t wait = until_next(d, now_ns());
        struct timespec timeout = {wait / 1000000000, wait % 1000000000};
        ppoll(fds, 3, &timeout, NULL);
        if (fds[2].revents && !command(d)) return 0;
        for (int i = 0; i < 2; i++) {
            if (fds[i].revents & POLLIN) take(&d[i]);
            deliver(&d[i]);
        }
    }
}
