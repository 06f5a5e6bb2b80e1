// Peers from npm, for the `compare` program. Each line of stdin requests a load, and each line of stdout has its result. Every peer is set
// up as its own documentation recommends.
import { performance } from 'node:perf_hooks';
import { createInterface } from 'node:readline';
import { Queue, Worker } from 'bullmq';
import { Redis } from 'ioredis';
import { RateLimiterRedis } from 'rate-limiter-flexible';
import Redlock from 'redlock';

const connection = { host: '127.0.0.1', port: Number(process.argv[2]) };
const connect = () => new Redis({ ...connection, enableAutoPipelining: true });
const client = connect();
// A second client for the trial, as in another process.
const other = connect();
const limiters = new Map();
// Retries without a limit. All other settings are defaults.
const redlock = new Redlock([client], { retryCount: -1 });
const queue = new Queue('node', { connection });
queue.on('error', (error) => { throw error; });

// A limiter of `quota` points per hour. A key over its quota is blocked in this process for `block` seconds, without a call to Redis.
function limiter(quota, block, storeClient = client) {
  const keyPrefix = `node${quota}-${block}`;
  const name = `${keyPrefix}-${storeClient === client}`;
  if (!limiters.has(name)) {
    const blocking = block ? { inMemoryBlockOnConsumed: quota, inMemoryBlockDuration: block } : {};
    limiters.set(name, new RateLimiterRedis({ storeClient, keyPrefix, points: quota, duration: 3600, ...blocking }));
  }
  return limiters.get(name);
}

async function admits(limiter, key) {
  try {
    await limiter.consume(key);
    return true;
  } catch (rejected) {
    if (rejected instanceof Error) throw rejected;
    return false;
  }
}

// Waits for all calls, even if one fails.
async function all(calls) {
  const failed = (await Promise.allSettled(calls)).find(({ status }) => status === 'rejected');
  if (failed) throw failed.reason;
}

// Runs `inFlight` concurrent calls for `ms`.
async function load({ inFlight, ms }, call) {
  const took = [];
  const counts = new Array(inFlight).fill(0);
  const begun = performance.now();
  await all(Array.from({ length: inFlight }, async (_, task) => {
    for (let turn = 0; performance.now() - begun < ms; turn++) {
      const called = performance.now();
      await call(task, turn);
      took.push(performance.now() - called);
      counts[task]++;
    }
  }));
  return { ...figures(performance.now() - begun, took), fewest: Math.min(...counts), most: Math.max(...counts) };
}

function figures(elapsed, took) {
  const sorted = Float64Array.from(took).sort();
  const us = (share) => sorted[Math.min(Math.floor(sorted.length * share), sorted.length - 1)] * 1e3;
  return { calls: sorted.length, per_s: (sorted.length / elapsed) * 1e3, p50_us: us(0.5), p99_us: us(0.99), longest_us: us(1) };
}

function scatter(task, turn, keys) {
  return (Math.imul(task * 1_000_003 + turn, 0x9e3779b1) >>> 0) % keys;
}

// Runs a worker of 100 jobs at a time until all have run, and fails if one runs twice.
async function work(jobs, each) {
  const seen = new Set();
  const twice = [];
  let finish;
  const finished = new Promise((resolve) => { finish = resolve; });
  const worker = new Worker('node', async (job) => {
    // BullMQ would retry a job that throws here, and report no error.
    if (seen.has(job.data.number)) return void twice.push(job.data.number);
    seen.add(job.data.number);
    each(job);
    if (seen.size === jobs) finish();
  }, { connection, concurrency: 100, removeOnComplete: { count: 0 } });
  worker.on('error', (error) => { throw error; });
  worker.on('failed', (job, error) => { throw error; });
  await finished;
  await worker.close();
  if (twice.length > 0) throw new Error(`jobs run twice: ${twice.slice(0, 3)}`);
}

// How many tasks hold each lock.
const held = new Map();
const loads = {
  trial: async ({ quota, keys, tasks }) => {
    let admitted = 0;
    await all(Array.from({ length: tasks }, async (_, task) => {
      for (let turn = 0; turn < (quota * 2 / tasks) * keys; turn++) {
        if (await admits(limiter(quota, 0, task % 2 ? other : client), turn % keys)) admitted++;
      }
    }));
    return { admitted };
  },
  decide: (asked) => load(asked, async (task, turn) => {
    if (!(await admits(limiter(1e9, 0), scatter(task, turn, asked.keys)))) throw new Error('the quota is out of reach');
  }),
  denied: async (asked) => {
    const blocked = limiter(5, 3600);
    for (let turn = 0; turn < 10; turn++) await admits(blocked, 'hot');
    return load(asked, async () => {
      if (await admits(blocked, 'hot')) throw new Error('the quota is used up');
    });
  },
  lock: (asked) => load(asked, async (task) => {
    const key = asked.own ? `redlock:${task}` : 'redlock:one';
    const lock = await redlock.lock(key, 30_000);
    const before = held.get(key) ?? 0;
    held.set(key, before + 1);
    // Lets another holder run, if there is one.
    await null;
    const after = held.get(key);
    held.set(key, after - 1);
    await lock.unlock();
    if (before !== 0 || after !== 1) throw new Error('two tasks hold the lock');
  }),
  push: (asked) => load(asked, (task) => queue.add('job', { payload: `payload-${task}` }, { delay: 60_000 })),
  bulk: (asked) => load(asked, (task) => queue.addBulk(
    Array.from({ length: asked.batch }, () => ({ name: 'job', data: { payload: `payload-${task}` }, opts: { delay: 60_000 } })),
  )),
  process: async ({ jobs }) => {
    for (let from = 0; from < jobs; from += 1_000) {
      const batch = Array.from({ length: Math.min(1_000, jobs - from) }, (_, at) => ({ name: 'job', data: { number: from + at } }));
      await queue.addBulk(batch);
    }
    let first;
    let last;
    await work(jobs, () => { last = performance.now(); first ??= last; });
    return { per_s: ((jobs - 1) / (last - first)) * 1e3, p50_us: 0, p99_us: 0 };
  },
  late: async ({ jobs, span }) => {
    const late = [];
    for (let number = 0; number < jobs; number++) {
      const due = Date.now() + 1_000 + (number * 7_919) % span;
      await queue.add('job', { number, due }, { delay: due - Date.now() });
    }
    await work(jobs, (job) => late.push(Math.max(Date.now() - job.data.due, 0)));
    return figures(1, late);
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const asked = JSON.parse(line);
  const answer = await loads[asked.do](asked).catch((error) => ({ failed: error.message }));
  console.log(JSON.stringify(answer));
}
process.exit(0);
