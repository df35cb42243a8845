import java.io.BufferedInputStream;
import java.io.EOFException;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.net.InetSocketAddress;
import java.net.Socket;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;

/** Asks Tollgate over REST and over RESP, with the standard library only. */
public final class Client {
    /** Answers come within milliseconds. A caller that waits longer has lost its connection. */
    private static final Duration TIMEOUT = Duration.ofSeconds(2);
    /** No reply of Tollgate is longer. */
    private static final int REPLY_MAX = 1 << 20;

    /** An answer to a check. A denial is an answer, not an exception. */
    record Answer(boolean allowed, long retryAfterSeconds, String json) {}

    /** Checks over HTTP. */
    static final class Rest {
        private final HttpClient client = HttpClient.newBuilder().connectTimeout(TIMEOUT).build();
        private final String base;
        private final String token;

        Rest(String base, String token) {
            this.base = base;
            this.token = token;
        }

        /** Takes one permit of a key. */
        Answer checkKey(String key) throws IOException, InterruptedException {
            return post("/api/v1/rate-limit/check", "{\"key\":" + quote(key) + "}");
        }

        /** Checks a request by the rules of the policy. */
        Answer checkRequest(String user, String path) throws IOException, InterruptedException {
            return post("/api/v1/check", "{\"user\":" + quote(user) + ",\"path\":" + quote(path) + "}");
        }

        private Answer post(String path, String body) throws IOException, InterruptedException {
            HttpRequest.Builder request = HttpRequest.newBuilder(URI.create(base + path))
                    .timeout(TIMEOUT)
                    .header("Content-Type", "application/json")
                    .POST(HttpRequest.BodyPublishers.ofString(body));
            if (token != null) {
                request.header("Authorization", "Bearer " + token);
            }
            HttpResponse<String> response = client.send(request.build(), HttpResponse.BodyHandlers.ofString());
            int status = response.statusCode();
            if (status != 200 && status != 429) {
                throw new IOException("Tollgate answered " + status + ": " + response.body());
            }
            // The status and the header say all that most callers need. The body has the rest, for a JSON library.
            long retry = response.headers().firstValueAsLong("Retry-After").orElse(0);
            return new Answer(status == 200, retry, response.body());
        }

        private static String quote(String text) {
            StringBuilder quoted = new StringBuilder("\"");
            for (char c : text.toCharArray()) {
                if (c < ' ' || c == '"' || c == '\\') {
                    quoted.append(String.format("\\u%04x", (int) c));
                } else {
                    quoted.append(c);
                }
            }
            return quoted.append('"').toString();
        }
    }

    /** A connection that speaks the protocol of Redis. */
    static final class Resp implements AutoCloseable {
        private final Socket socket = new Socket();
        private final InputStream in;
        private final OutputStream out;

        Resp(String host, int port, String token) throws IOException {
            socket.connect(new InetSocketAddress(host, port), (int) TIMEOUT.toMillis());
            socket.setSoTimeout((int) TIMEOUT.toMillis());
            socket.setTcpNoDelay(true);
            in = new BufferedInputStream(socket.getInputStream());
            out = socket.getOutputStream();
            if (token != null) {
                command("AUTH", token);
            }
        }

        /** Sends a command and reads its reply: a String, a Long, null or a List of these. */
        Object command(String... words) throws IOException {
            StringBuilder text = new StringBuilder("*" + words.length + "\r\n");
            for (String word : words) {
                text.append('$').append(word.getBytes(StandardCharsets.UTF_8).length).append("\r\n").append(word).append("\r\n");
            }
            out.write(text.toString().getBytes(StandardCharsets.UTF_8));
            return read();
        }

        private Object read() throws IOException {
            String line = line();
            String text = line.substring(1);
            return switch (line.charAt(0)) {
                case '+' -> text;
                case '-' -> throw new IOException(text);
                case ':' -> Long.parseLong(text);
                case '$' -> bulk(length(text));
                case '*' -> list(length(text));
                default -> throw new IOException("not a reply: " + line);
            };
        }

        private static int length(String text) throws IOException {
            int length = Integer.parseInt(text);
            if (length > REPLY_MAX) {
                throw new IOException("a reply of " + length + " bytes");
            }
            return length;
        }

        private String bulk(int length) throws IOException {
            if (length < 0) {
                return null;
            }
            byte[] bytes = in.readNBytes(length + 2);
            if (bytes.length < length + 2) {
                throw new EOFException("the connection has ended");
            }
            return new String(bytes, 0, length, StandardCharsets.UTF_8);
        }

        private List<Object> list(int length) throws IOException {
            List<Object> list = new ArrayList<>();
            for (int i = 0; i < length; i++) {
                list.add(read());
            }
            return list;
        }

        private String line() throws IOException {
            StringBuilder line = new StringBuilder();
            for (int c = in.read(); c != '\n'; c = in.read()) {
                if (c < 0 || line.length() > REPLY_MAX) {
                    throw new EOFException("the connection has ended");
                }
                line.append((char) c);
            }
            if (line.length() < 2) {
                throw new IOException("an empty reply");
            }
            return line.substring(0, line.length() - 1);
        }

        @Override
        public void close() throws IOException {
            socket.close();
        }
    }

    /** Arguments: the URL of the API, and the host and port of the RESP listener; `-` leaves one out. */
    public static void main(String[] arguments) throws IOException, InterruptedException {
        String url = arguments.length > 0 ? arguments[0] : "http://127.0.0.1:8080";
        String address = arguments.length > 1 ? arguments[1] : "127.0.0.1:6380";
        String token = System.getenv("TOLLGATE_TOKEN");
        if (!url.equals("-")) {
            Rest rest = new Rest(url, token);
            System.out.println("REST key: " + rest.checkKey("user:1"));
            System.out.println("REST request: " + rest.checkRequest("alice", "/api/items"));
        }
        if (address.equals("-")) {
            return;
        }
        int colon = address.lastIndexOf(':');
        try (Resp resp = new Resp(address.substring(0, colon), Integer.parseInt(address.substring(colon + 1)), token)) {
            // Five integers: limited (0 or 1), limit, remaining, seconds to wait (-1 if allowed), seconds until the limit is full.
            System.out.println("RESP CL.THROTTLE: " + resp.command("CL.THROTTLE", "user:1", "99", "100", "60"));
            // Names and values in turn.
            System.out.println("RESP TG.CHECK: " + resp.command("TG.CHECK", "user", "alice", "path", "/api/items"));
        }
    }
}
