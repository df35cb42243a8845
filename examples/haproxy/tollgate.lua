-- Asks Tollgate whether a request may go ahead: `http-request lua.tollgate`.

-- The section `listen tollgate` of haproxy.cfg.
local SOCKET = "unix@tollgate.sock"
local URL = "http://localhost/forward-auth/haproxy"
-- What happens to requests while Tollgate is down: true lets them pass, false answers 503.
local OPEN = true
-- Headers of the client that Tollgate identifies users by (identity.jwt, identity.api_key). Add the headers that your rules read.
local HEADERS = { "authorization", "x-api-key" }

local function ask(txn)
  -- Nothing else that the client sends reaches Tollgate, so a client cannot choose its address or its path.
  local headers = {
    ["x-forwarded-for"] = { txn.sf:src() },
    ["x-forwarded-method"] = { txn.sf:method() },
    ["x-forwarded-host"] = { txn.sf:req_fhdr("host") },
    ["x-forwarded-uri"] = { txn.sf:pathq() },
  }
  for _, name in ipairs(HEADERS) do
    local value = txn.sf:req_fhdr(name)
    if value ~= "" then
      headers[name] = { value }
    end
  end
  return core.httpclient():get({ url = URL, dst = SOCKET, headers = headers })
end

-- HAProxy writes the answer itself if there is none, without the headers of Tollgate.
local function is_answer(response)
  return response and response.headers and (response.status < 500 or response.headers["x-tollgate-basis"])
end

core.register_action("tollgate", { "http-req" }, function(txn)
  local response = ask(txn)
  if is_answer(response) and response.status < 300 then
    for name, variable in pairs({ ["ratelimit"] = "txn.ratelimit", ["ratelimit-policy"] = "txn.ratelimit_policy" }) do
      if response.headers[name] then
        txn:set_var(variable, response.headers[name][0])
      end
    end
    return
  end
  if not is_answer(response) and OPEN then
    return
  end
  local reply = txn:reply({ status = 503 })
  if is_answer(response) then
    reply:set_status(response.status)
    reply:set_body(response.body)
    for _, name in ipairs({ "content-type", "retry-after", "ratelimit", "ratelimit-policy" }) do
      if response.headers[name] then
        reply:add_header(name, response.headers[name][0])
      end
    end
  end
  txn:done(reply)
end)
