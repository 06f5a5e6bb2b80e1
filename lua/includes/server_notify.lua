-- server_notify: notify the subscribers of a channel.

-- Returns how many were notified. If the server refuses to publish, it returns 0, and the subscribers poll.
local function notify(publish, channel, message)
  local notified = redis.pcall(publish, channel, message)
  if publish == 'SPUBLISH' and type(notified) ~= 'number' then
    -- Redis 6.2 lacks SPUBLISH, and its PUBLISH counts only this node.
    notified = type(redis.pcall('PUBLISH', channel, message)) == 'number' and 1
  end
  return type(notified) == 'number' and notified or 0
end
