-- delay_queue_pause: pause or resume a queue.
--
-- Includes server_notify, delay_queue_time, delay_queue_keys, delay_queue_wake, delay_queue_state
-- ARGV[4]  paused  1 or 0
--
-- Returns  1
-- Repeat   harmless
is_paused = ARGV[4] + 0
wake_for(now)
return 1
